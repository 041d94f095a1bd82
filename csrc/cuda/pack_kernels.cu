#include <algorithm>

#include "cuda/cuda_error.h"
#include "cuda/pack_kernels.h"
#include "cuda/pack_lane.h"

namespace horon {
namespace {

constexpr unsigned kWarpsPerBlock = 2;
// At least so many are resident. From 14 to 18 nvcc 13.0 makes the same code, of 56 registers.
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
  std::copy(planned.entries.begin(), planned.entries.end(), table.entries);
  const unsigned n_blocks = (planned.header.n_warps - 1) / kWarpsPerBlock + 1;
  pack_kernel<kCapacity><<<n_blocks, kWarpsPerBlock * kWarpLanes, 0, stream>>>(table);
  HORON_CUDA_CHECK(cudaGetLastError(), "launch of the pack kernel with ", planned.header.n_parts,
                   " parts in ", n_blocks, " blocks");
}

template <std::uint32_t kCapacity>
void load() {
  cudaFuncAttributes attributes{};
  HORON_CUDA_CHECK(cudaFuncGetAttributes(&attributes, pack_kernel<kCapacity>), "the pack kernel");
}

}  // namespace

void launch_pack(const std::vector<PackLaunch>& launches, StreamHandle stream) {
  for (const PackLaunch& planned : launches) {
    HORON_CHECK(planned.entries.size() <= kMaxTableParts, "pack: ", planned.entries.size(),
                " parts in one launch, expected at most ", kMaxTableParts, ".");
    visit_smallest_table(planned.entries.size(), [&](auto capacity) {
      launch<decltype(capacity)::value>(planned, stream);
    });
  }
}

void load_pack_kernels() {
  visit_every_table([](auto capacity) { load<decltype(capacity)::value>(); });
}

}  // namespace horon
