// From an agreed batch of named operations on CUDA tensors to what is queued on a stream. Pure, but
// for the memory that it asks for.
//
// Note [Tensors that lie as in the buffer]
// Tensors of a batch are packed into one piece of memory, at offsets that follow from their sizes
// by one rule on all ranks (kFusionAlignment), and reduced by one call. Where they lie at just
// these distances already, without gaps and with results in place (a DistributedOptimizer's
// gradients do), their own memory is that piece: nothing is packed. That is each rank's own
// affair, since the call is the same: its count covers the padding between tensors in any case.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/function_ref.h"
#include "cuda/fusion_policy.h"
#include "cuda/pack_plan.h"
#include "named/device_batches.h"
#include "nccl/nccl_plan.h"

namespace horon {

// In this order, on one stream.
struct NamedBatchPlan {
  std::vector<Span> zeros;  // set to zero: what a rank that has joined brings
  std::vector<PackLaunch> before;
  std::vector<NcclCall> calls;  // one group; the same on all ranks but for addresses
  std::vector<PackLaunch> after;
};

// Where the batch is carried out.
struct NamedBatchPlace {
  int rank = 0;  // in the set
  int n_ranks = 1;
  FusionCost cost;  // the same on all ranks
};

// Device memory, aligned to 256 bytes, that lives until the stream has come past what is queued.
using ScratchMaker = FunctionRef<std::byte*(std::size_t bytes)>;

// Whether a GPU can reduce elements of this type as named operations define it: integers are
// scaled in double precision, and NCCL knows no 16-bit integers and no Adasum. What it can not
// goes by way of the host (DeviceKind::kCudaByHost).
bool is_reduced_on_device(DType dtype, NamedOp op, double prescale, double postscale);

// Gives results whose size was not known before memory, and plans everything. Factors are applied
// in float32 (float64 for float64), while tensors are packed and unpacked if they are. Throws what
// NamedOperation::allocate and make_scratch throw.
NamedBatchPlan plan_named_batch(const DeviceBatch& batch, const NamedBatchPlace& place,
                                ScratchMaker make_scratch);

}  // namespace horon
