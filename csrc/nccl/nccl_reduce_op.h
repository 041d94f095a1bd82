// The engine's reduce ops as NCCL's. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/op_kind.h"
#include "core/reduce_op.h"
#include "nccl/nccl_dtype.h"

namespace horon {

// What NCCL is asked to do with the elements of a tensor.
struct NcclReduction {
  NcclDataType dtype = NcclDataType::kFloat32;
  NcclReduceOp op = NcclReduceOp::kSum;
  bool has_factor = false;  // PREMUL_SUM: an op has to be created for the factor first
  double factor = 1.0;
  std::uint64_t parts_per_element = 1;  // 2 for complex
};

// Throws UsageError for what NCCL does not have: bit operations, 16-bit integers, products and
// extremes of complex numbers, averages of bool, opaque bytes. `kind` is for the message.
// bool is a logical or for SUM and MAX, a logical and for PRODUCT and MIN.
NcclReduction nccl_reduction(OpKind kind, DType dtype, Float8 float8, ReduceOp op, double factor);

// PREMUL_SUM's factor as one element of the type, as NCCL reads it.
struct NcclFactor {
  alignas(8) std::array<std::byte, 8> bytes{};
};
// Throws UsageError for the 8-bit floats. Integers round towards zero.
NcclFactor nccl_factor(NcclDataType dtype, double factor);

}  // namespace horon
