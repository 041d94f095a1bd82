#include "nccl/premul_ops.h"

#include "core/error.h"
#include "core/log.h"

namespace horon {

PremulOps::~PremulOps() {
  if (use_.is_over()) {
    return;  // they went with the communicator
  }
  for (const Made& made : made_) {
    const NcclResult result = api_.destroy_op(made.op, use_.handle());
    if (result != NcclResult::kSuccess) {
      log_warning(concat("ncclRedOpDestroy: ", api_.error_text(result)));
    }
  }
}

NcclReduceOp PremulOps::op_for(const NcclReduction& reduction) {
  if (!reduction.has_factor) {
    return reduction.op;
  }
  for (const Made& made : made_) {
    if (made.dtype == reduction.dtype && made.factor == reduction.factor) {
      return made.op;
    }
  }
  const NcclFactor factor = nccl_factor(reduction.dtype, reduction.factor);
  NcclReduceOp op = NcclReduceOp::kSum;
  use_.check(api_.create_premul_sum(&op, factor.bytes.data(), reduction.dtype, use_.handle()),
             "ncclRedOpCreatePreMulSum");
  made_.push_back({reduction.dtype, reduction.factor, op});
  return op;
}

}  // namespace horon
