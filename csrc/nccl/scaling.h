// A reduction of scaled values: the call's own operation, and what is done before and after it.
#pragma once

#include "core/reduce_op.h"

namespace horon {

struct Scaling {
  ReduceOp op = ReduceOp::kSum;
  double before = 1.0;  // each rank's values are multiplied by this
  double after = 1.0;   // and the results by this
};

}  // namespace horon
