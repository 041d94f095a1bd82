// Which agreed operations travel together.
#pragma once

#include <cstddef>
#include <vector>

#include "named/named_request.h"

namespace horon {

struct FusionOptions {
  // A batch holds at most this many bytes. 0: everything travels alone.
  std::size_t threshold_bytes = std::size_t{128} << 20;
  // A tensor with more travels alone: copying it twice would cost more than a transfer of its own.
  std::size_t alone_bytes = std::size_t{512} << 10;
  // The same for tensors on a GPU, whose memory is faster and whose transfers cost more to start:
  // at most largest_fused_bytes() of FusionCost's defaults.
  std::size_t gpu_alone_bytes = std::size_t{10} << 20;
};

// One tensor of an agreed operation.
struct FusionItem {
  const NamedRequest* request = nullptr;
  std::size_t tensor = 0;  // of request->tensors
};

// Indices into the items, in the order in which they lie in the buffer.
using Batch = std::vector<std::size_t>;

// Pure: the same log gives the same plan on every rank, and a rank that sees only the operations of
// some process sets gets the batches of those, in the same order.
//
// Smaller priorities go first, equal ones in the order of the log; the log is finite, so nothing
// starves. A batch holds tensors of one process set, kind, dtype, op, factors and device, and takes
// the place of its first.
std::vector<Batch> plan_fusion(const std::vector<FusionItem>& items, const FusionOptions& options);

}  // namespace horon
