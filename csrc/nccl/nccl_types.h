// NCCL's types in our own words. No NCCL or CUDA header is needed, so that everything but the seam
// itself compiles and is tested anywhere. The values are NCCL's; nccl_api.cc checks that.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "cuda/handles.h"

struct ncclComm;

namespace horon {

using NcclCommHandle = ncclComm*;  // ncclComm_t

enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class NcclDataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 11,
};

// Values above kAvg are handles that NCCL gives out (create_premul_sum).
enum class NcclReduceOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct NcclUniqueId {
  std::array<char, 128> bytes{};
  friend bool operator==(const NcclUniqueId&, const NcclUniqueId&) = default;
};

// How a communicator is made. 0 and empty mean NCCL's default.
struct NcclConfig {
  // Whether calls return before they are done. Without it a peer that never comes is waited for
  // without a limit. With it every call costs NCCL a thread; see decision 0017.
  bool is_blocking = false;
  // Thread blocks of its kernels. Bounds what overlapping communicators take from each other.
  int min_blocks = 0;
  int max_blocks = 0;
  // A communicator made by split shares channels with its parent: less memory, but the two must not
  // be used at the same time.
  bool shares_resources_of_parent = false;
  std::string name;  // for NCCL's own messages and profilers
};

}  // namespace horon
