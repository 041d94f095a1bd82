// Times the pack kernel with other constants than horon's own, against a plain copy of the device.
//
// gpu_pack_variants.py builds one program for each set of constants:
// - WARPS and MIN_BLOCKS are kWarpsPerBlock and kBlocksPerMultiprocessor of
// csrc/cuda/pack_kernels.cu;
// - UNROLL is kUnroll of csrc/cuda/pack_table.h, ROUNDS how many times as many grains a warp has;
// - STREAMING is 1 where loads and stores have the evict-first hint, 2 where loads alone do.
//
// One line of JSON for each workload: medians of the rounds in microseconds, the kernel and the
// copy in turn.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/pack_lane.h"
#include "cuda/pack_plan.h"

using namespace horon;

namespace {

constexpr std::size_t kSourceAlignment = 512;  // as torch's allocator
constexpr std::size_t kBufferAlignment = 16;
constexpr int kWarmUp = 2;
constexpr long long kHeadStartCycles =
    60'000;  // the host is ahead of the device when the clock starts

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}

template <std::uint32_t kCapacity>
__global__ void __launch_bounds__(WARPS* kWarpLanes, MIN_BLOCKS)
    pack_kernel(const __grid_constant__ PackTable<kCapacity> table) {
  run_pack_lane(table, blockIdx.x * WARPS + threadIdx.x / kWarpLanes, threadIdx.x % kWarpLanes);
}

__global__ void head_start(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

template <std::uint32_t kCapacity>
void launch(const PackLaunch& planned, cudaStream_t stream) {
  static PackTable<kCapacity> table;
  table.header = planned.header;
  std::copy(planned.entries.begin(), planned.entries.end(), table.entries);
  const unsigned n_blocks = (planned.header.n_warps - 1) / WARPS + 1;
  pack_kernel<kCapacity><<<n_blocks, WARPS * kWarpLanes, 0, stream>>>(table);
}

void launch_all(const std::vector<PackLaunch>& launches, cudaStream_t stream) {
  for (const PackLaunch& planned : launches) {
    visit_smallest_table(planned.entries.size(), [&](auto capacity) {
      launch<decltype(capacity)::value>(planned, stream);
    });
  }
}

struct Workload {
  std::string name;
  std::vector<std::size_t> bytes;  // of float32 tensors
};

std::size_t rounded_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

enum class Kind { kCopy, kScale, kToBFloat16 };

const char* name_of(Kind kind) {
  return kind == Kind::kCopy ? "copy" : kind == Kind::kScale ? "times 0.5" : "to bfloat16";
}

class Bench {
 public:
  explicit Bench(int n_rounds) : n_rounds_(n_rounds) {
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }

  void run(const Workload& workload) {
    std::size_t room = 0;
    std::size_t moved = 0;
    for (const std::size_t bytes : workload.bytes) {
      room += rounded_up(bytes, kSourceAlignment);
      moved += bytes;
    }
    char* source = allocate(room);
    char* packed = allocate(room);
    char* copied = allocate(room);
    check(cudaMemset(source, 0x3f, room), "cudaMemset");  // 0.747 in every float
    for (const Kind kind : {Kind::kCopy, Kind::kScale, Kind::kToBFloat16}) {
      const std::vector<PackLaunch> launches = planned(workload, kind, source, packed);
      std::vector<float> kernel;
      std::vector<float> plain;
      for (int round = -kWarmUp; round < n_rounds_; ++round) {
        const float took = timed([&] { launch_all(launches, stream_); });
        const float took_plain = timed([&] { copy(copied, source, moved); });
        if (round >= 0) {
          kernel.push_back(took);
          plain.push_back(took_plain);
        }
      }
      print(workload, kind, launches.size(), median(kernel), median(plain));
    }
    for (char* memory : {source, packed, copied}) {
      check(cudaFree(memory), "cudaFree");
    }
  }

 private:
  static char* allocate(std::size_t bytes) {
    char* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }

  std::vector<PackLaunch> planned(const Workload& workload, Kind kind, char* source,
                                  char* packed) const {
    std::vector<PackTensor> tensors;
    std::size_t at = 0;
    std::size_t offset = 0;
    const bool half = kind == Kind::kToBFloat16;
    for (const std::size_t bytes : workload.bytes) {
      PackTensor tensor;
      tensor.address = reinterpret_cast<std::uint64_t>(source + at);
      tensor.buffer_offset = offset;
      tensor.elements = bytes / 4;
      tensor.dtype = DType::kFloat32;
      tensor.buffer_dtype = half ? DType::kBFloat16 : DType::kFloat32;
      tensors.push_back(tensor);
      at += rounded_up(bytes, kSourceAlignment);
      offset += rounded_up(half ? bytes / 2 : bytes, kBufferAlignment);
    }
    return plan_pack(PackDirection::kPack, tensors, reinterpret_cast<std::uint64_t>(packed),
                     kind == Kind::kScale ? 0.5 : 1.0);
  }

  void copy(char* destination, const char* source, std::size_t bytes) {
    check(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
  }

  template <class Work>
  float timed(Work&& work) {
    head_start<<<1, 1, 0, stream_>>>(kHeadStartCycles);
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    work();
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    check(cudaGetLastError(), "launch");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds * 1e3f;
  }

  static float median(std::vector<float>& values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  static void print(const Workload& workload, Kind kind, std::size_t n_launches, float kernel,
                    float plain) {
    std::printf(
        "{\"workload\": \"%s\", \"kind\": \"%s\", \"unroll\": %d, \"rounds\": %d, \"warps\": %d, "
        "\"min_blocks\": %d, \"streaming\": %d, \"launches\": %zu, \"us\": %.2f, \"copy_us\": "
        "%.2f}\n",
        workload.name.c_str(), name_of(kind), UNROLL, ROUNDS, WARPS, MIN_BLOCKS, STREAMING,
        n_launches, kernel, plain);
    std::fflush(stdout);
  }

  int n_rounds_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace

// Reads workloads from stdin, each a line: bytes of each tensor, separated by spaces, after the
// name and a tab.
int main(int argc, char** argv) {
  Bench bench(argc > 1 ? std::atoi(argv[1]) : 15);
  std::string line;
  while (std::getline(std::cin, line)) {
    const std::size_t tab = line.find('\t');
    Workload workload{line.substr(0, tab), {}};
    std::istringstream sizes(line.substr(tab + 1));
    for (std::size_t bytes = 0; sizes >> bytes;) {
      workload.bytes.push_back(bytes);
    }
    bench.run(workload);
  }
}
