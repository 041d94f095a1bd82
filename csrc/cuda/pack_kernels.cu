#include <algorithm>

#include "cuda/cuda_error.h"
#include "cuda/pack_kernels.h"
#include "cuda/pack_lane.h"

namespace horon {
namespace {

constexpr unsigned kWarpsPerBlock = 2;
// At least so many are resident. With 16, which leaves 64 registers a thread, nvcc 13.0 spills.
constexpr unsigned kBlocksPerMultiprocessor = 14;

// __grid_constant__: the table is read where the launch put it, not copied for each thread.
template <std::uint32_t kCapacity>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpLanes, kBlocksPerMultiprocessor)
    pack_kernel(const __grid_constant__ PackTable<kCapacity> table) {
  run_pack_lane(table, blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarpLanes,
                threadIdx.x % kWarpLanes);
}

template <std::uint32_t kCapacity>
void launch(const PackLaunch& planned, cudaStream_t stream) {
  PackTable<kCapacity> table;  // entries beyond n_parts are never read
  table.header = planned.header;
  std::copy(planned.parts.begin(), planned.parts.end(), table.parts);
  const unsigned n_blocks = (planned.n_warps() + kWarpsPerBlock - 1) / kWarpsPerBlock;
  pack_kernel<kCapacity><<<n_blocks, kWarpsPerBlock * kWarpLanes, 0, stream>>>(table);
  HORON_CUDA_CHECK(cudaGetLastError(), "launch of the pack kernel with ", planned.parts.size(),
                   " parts in ", n_blocks, " blocks");
}

}  // namespace

void launch_pack(const std::vector<PackLaunch>& launches, StreamHandle stream) {
  for (const PackLaunch& planned : launches) {
    HORON_CHECK(planned.parts.size() <= kLargeTableParts, "pack: ", planned.parts.size(),
                " parts in one launch, expected at most ", kLargeTableParts, ".");
    if (planned.parts.size() <= kSmallTableParts) {
      launch<kSmallTableParts>(planned, stream);
    } else {
      launch<kLargeTableParts>(planned, stream);
    }
  }
}

void load_pack_kernels() {
  cudaFuncAttributes attributes{};
  HORON_CUDA_CHECK(cudaFuncGetAttributes(&attributes, pack_kernel<kSmallTableParts>),
                   "the pack kernel");
  HORON_CUDA_CHECK(cudaFuncGetAttributes(&attributes, pack_kernel<kLargeTableParts>),
                   "the pack kernel");
}

}  // namespace horon
