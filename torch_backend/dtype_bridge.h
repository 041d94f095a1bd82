// torch's element types and reduce ops in the engine's terms.
#pragma once

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/dtype.h"
#include "core/reduce_op.h"
#include "nccl/nccl_dtype.h"

namespace horon::torch_backend {

// kOpaque for types that horon moves but does not reduce (float8, quantized).
DType to_dtype(c10::ScalarType type);

// Of a request's type code, which is torch's own.
Float8 float8_of(std::uint8_t type_code);

struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1.0;  // PREMUL_SUM
};

// Throws ValueError for an op that c10d does not define.
Reduction to_reduction(const c10d::ReduceOp& op);

}  // namespace horon::torch_backend
