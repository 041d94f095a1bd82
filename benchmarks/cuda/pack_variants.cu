// Times the pack kernel with other constants than horon's own, against a plain copy of the device.
//
// gpu_pack_variants.py builds one program for each set of constants, with
//   THREADS, MIN_BLOCKS   as kThreads and kBlocksPerMultiprocessor of csrc/cuda/pack_kernels.cu
//   UNROLL                as kUnroll of csrc/cuda/pack_block.h
//   STREAMING             1: loads and stores with the evict-first hint
// and each tries several numbers of bytes for each block; 0 stands for what plan_pack chose. One
// line of JSON for each workload: medians of the rounds in microseconds, all variants and the copy
// in turn.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/pack_block.h"
#include "cuda/pack_plan.h"

using namespace horon;

namespace {

constexpr std::size_t kSourceAlignment = 512;  // as torch's allocator
constexpr std::size_t kBufferAlignment = 16;
constexpr unsigned kBlockKiB[] = {0, 4, 8, 16, 32, 64, 128};
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
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    pack_kernel(const __grid_constant__ PackTable<kCapacity> table) {
  run_pack_thread(table, blockIdx.x, threadIdx.x, THREADS);
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
  std::copy(planned.parts.begin(), planned.parts.end(), table.parts);
  pack_kernel<kCapacity><<<planned.n_blocks(), THREADS, 0, stream>>>(table);
}

void launch_all(const std::vector<PackLaunch>& launches, cudaStream_t stream) {
  for (const PackLaunch& planned : launches) {
    if (planned.parts.size() <= kSmallTableParts) {
      launch<kSmallTableParts>(planned, stream);
    } else {
      launch<kLargeTableParts>(planned, stream);
    }
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
    check(cudaDeviceGetAttribute(&n_multiprocessors_, cudaDevAttrMultiProcessorCount, 0),
          "cudaDeviceGetAttribute");
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
      std::vector<std::vector<PackLaunch>> plans;
      for (const unsigned kib : kBlockKiB) {
        plans.push_back(planned(workload, kind, source, packed, kib));
      }
      std::vector<std::vector<float>> microseconds(plans.size() + 1);
      for (int round = -kWarmUp; round < n_rounds_; ++round) {
        for (std::size_t i = 0; i <= plans.size(); ++i) {
          const float took = i < plans.size() ? timed([&] { launch_all(plans[i], stream_); })
                                              : timed([&] { copy(copied, source, moved); });
          if (round >= 0) {
            microseconds[i].push_back(took);
          }
        }
      }
      print(workload, kind, plans, microseconds);
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

  std::vector<PackLaunch> planned(const Workload& workload, Kind kind, char* source, char* packed,
                                  unsigned block_kib) const {
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
    PackOptions options;
    options.factor = kind == Kind::kScale ? 0.5 : 1.0;
    options.n_multiprocessors = static_cast<std::uint32_t>(n_multiprocessors_);
    std::vector<PackLaunch> launches =
        plan_pack(PackDirection::kPack, tensors, reinterpret_cast<std::uint64_t>(packed), options);
    if (block_kib != 0) {
      for (PackLaunch& launch : launches) {
        launch.header.grains_per_block = block_kib * 1024 / kGrainBytes;
      }
    }
    return launches;
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

  static void print(const Workload& workload, Kind kind,
                    const std::vector<std::vector<PackLaunch>>& plans,
                    std::vector<std::vector<float>>& microseconds) {
    const auto median = [](std::vector<float>& values) {
      std::sort(values.begin(), values.end());
      return values[values.size() / 2];
    };
    std::printf(
        "{\"workload\": \"%s\", \"kind\": \"%s\", \"unroll\": %d, \"threads\": %d, "
        "\"min_blocks\": %d, \"streaming\": %d, \"launches\": %zu, \"planned_kib\": %u, \"us\": {",
        workload.name.c_str(), name_of(kind), UNROLL, THREADS, MIN_BLOCKS, STREAMING,
        plans[0].size(),
        static_cast<unsigned>(plans[0][0].header.grains_per_block * kGrainBytes / 1024));
    for (std::size_t i = 0; i < plans.size(); ++i) {
      std::printf("\"%u\": %.2f, ", kBlockKiB[i], median(microseconds[i]));
    }
    std::printf("\"copy\": %.2f}}\n", median(microseconds.back()));
    std::fflush(stdout);
  }

  int n_rounds_;
  int n_multiprocessors_ = 0;
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
