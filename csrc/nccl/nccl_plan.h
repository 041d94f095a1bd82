// From a collective to the calls of NCCL that carry it out. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/request.h"
#include "cuda/pack_plan.h"
#include "nccl/nccl_reduce_op.h"

namespace horon {

enum class NcclFunction : std::uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv,
};

const char* name(NcclFunction function);

struct NcclCall {
  NcclFunction function = NcclFunction::kAllReduce;
  const void* send = nullptr;
  void* recv = nullptr;
  std::uint64_t count = 0;  // as NCCL counts for this function
  NcclReduction reduction;  // dtype: of all functions; the rest: of reductions
  int peer = 0;             // the other end, or the root
};

// In this order, on one stream. Calls are one group.
struct NcclPlan {
  std::vector<ByteCopy> before;
  std::vector<NcclCall> calls;
  std::vector<ByteCopy> after;
};

// What a plan needs to know besides the request.
struct NcclPlace {
  int rank = 0;
  int n_ranks = 1;
  Float8 float8 = Float8::kNone;  // of requests whose dtype is kOpaque
  // Device memory of scratch_bytes(); all plans of one stream may share it.
  std::byte* scratch = nullptr;
};

// Note [One plan on all ranks]
// NCCL has no arrival phase: ranks that make different calls hang. So a plan's calls depend only on
// what the ranks have in common (kind, dtype, op, counts), never on addresses. Where a list of
// tensors does not happen to be one piece of memory, only the copies around the calls differ.
// Counts of 0 make no call, on no rank.
//
// Note [Groups of one]
// One rank's results are its own values, or a multiple of them. In place there is nothing to do,
// elsewhere a copy, which NCCL would make too; it is asked for factors only. There NCCL before
// 2.29.7 leaves up to 31 times 16 bytes at the end untouched: its kernel gives each of n blocks
// 1/n of the elements, rounded down (src/device/onerank.cu), where n is one for each 16 KiB, at
// most 32. So a call has elements that can be divided so, and the rest is a call of its own.

// How much scratch memory plan_nccl needs for the requests, which are those of one (coalesced)
// call.
std::size_t scratch_bytes(const std::vector<Request>& requests, int n_ranks);

// Throws UsageError: a request with a refusal, counts that do not fit together, a reduction that
// NCCL lacks, a kind that it lacks (windows).
NcclPlan plan_nccl(const std::vector<Request>& requests, const NcclPlace& place);

NcclCall plan_send(const ConstSpan& message, int peer);
NcclCall plan_recv(const Span& message, int peer);

}  // namespace horon
