// Which tensors of a coalesced call go through the fusion buffer, and which directly. Pure.
//
// Note [What fusion costs]
// Through the buffer, k tensors of S bytes become one call of NCCL instead of k, which saves k - 1
// times what a call costs besides its transfer. It takes two launches more (pack and unpack), and
// moves 4 S bytes through the device's memory: each byte is read and written twice. So a large
// tensor never gains, and small ones gain when there are enough of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace horon {

// The defaults follow from measurements on an H200 (docs/gpu-results.md). All ranks of a group must
// use the same values, whatever GPUs they have: the decision says which calls are made.
struct FusionCost {
  // One more call in a group of NCCL's. The host takes 3.8 us for it. What the GPU takes besides
  // the bytes depends on how the ranks are connected: 230 us were measured for two that share a GPU
  // and talk over sockets; 8 are assumed, as for NVLink.
  double seconds_per_call = 12e-6;
  // A launch of the pack kernel, host and device.
  double seconds_per_launch = 5e-6;
  // What a copy within the device reads and writes together.
  double bytes_per_second = 3.6e12;
  // Size of the fusion buffer. More goes in several batches, each a call of its own.
  std::uint64_t buffer_bytes = std::uint64_t{64} << 20;
};

struct FusionTensor {
  std::uint64_t bytes = 0;  // in the buffer
  // Tensors of equal kind may be reduced by one call: the same dtype in the buffer, op and factor.
  std::uint32_t kind = 0;
};

// Tensors by their index, and where each lies in the buffer. Gaps are reduced along, and never
// read.
struct FusionBatch {
  std::uint32_t kind = 0;
  std::vector<std::size_t> tensors;
  std::vector<std::uint64_t> offsets;
  std::uint64_t bytes = 0;  // to the end of the last tensor
};

struct FusionDecision {
  std::vector<FusionBatch> batches;
  std::vector<std::size_t> direct;  // in the order of the call; tensors of 0 bytes are here, too
};

// Where tensors begin in the buffer, so that the pack kernel's accesses are the widest.
inline constexpr std::uint64_t kFusionAlignment = 16;

// Batches are filled in the order of the call.
FusionDecision decide_fusion(const std::vector<FusionTensor>& tensors, const FusionCost& cost);

// The largest tensor that gains by going through the buffer in good company.
std::uint64_t largest_fused_bytes(const FusionCost& cost);

}  // namespace horon
