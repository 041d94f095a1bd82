#include "nccl/nccl_reduce_op.h"

#include <cstring>

#include "core/error.h"
#include "cuda/half_bits.h"

namespace horon {
namespace {

[[noreturn]] void refuse(OpKind kind, DType dtype, ReduceOp op, const char* advice) {
  throw UsageError(concat(name(kind), ": NCCL has no ", name(op), " for tensors of ", name(dtype),
                          ". ", advice));
}

NcclReduceOp op_for_bool(OpKind kind, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:  // adding uint8 would give 2, or wrap to 0
    case ReduceOp::kMax:
      return NcclReduceOp::kMax;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return NcclReduceOp::kMin;
    default:
      refuse(kind, DType::kBool, op, "Convert to a type of numbers first.");
  }
}

}  // namespace

NcclReduction nccl_reduction(OpKind kind, DType dtype, Float8 float8, ReduceOp op, double factor) {
  if (op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor) {
    refuse(kind, dtype, op, "Gather the tensors and combine them, or use a CPU tensor.");
  }
  const auto nccl = nccl_dtype(dtype, float8);
  if (!nccl) {
    refuse(kind, dtype, op, "Convert to a type that it reduces, say int32 or float32.");
  }
  NcclReduction reduction;
  reduction.dtype = *nccl;
  if (dtype == DType::kBool) {
    reduction.op = op_for_bool(kind, op);
    return reduction;
  }
  if (dtype == DType::kComplex64 || dtype == DType::kComplex128) {
    if (op != ReduceOp::kSum && op != ReduceOp::kAvg && op != ReduceOp::kPremulSum) {
      refuse(kind, dtype, op, "Only sums can be taken of real and imaginary parts separately.");
    }
    reduction.parts_per_element = 2;
  }
  switch (op) {
    case ReduceOp::kAvg:
      reduction.op = NcclReduceOp::kAvg;
      break;
    case ReduceOp::kProduct:
      reduction.op = NcclReduceOp::kProduct;
      break;
    case ReduceOp::kMin:
      reduction.op = NcclReduceOp::kMin;
      break;
    case ReduceOp::kMax:
      reduction.op = NcclReduceOp::kMax;
      break;
    case ReduceOp::kPremulSum:
      reduction.has_factor = true;
      reduction.factor = factor;
      (void)nccl_factor(*nccl, factor);  // refused now rather than between two calls
      break;
    default:
      reduction.op = NcclReduceOp::kSum;
  }
  return reduction;
}

NcclFactor nccl_factor(NcclDataType dtype, double factor) {
  NcclFactor result;
  const auto put = [&result](auto value) {
    std::memcpy(result.bytes.data(), &value, sizeof value);
    return result;
  };
  switch (dtype) {
    case NcclDataType::kInt8:
      return put(static_cast<std::int8_t>(factor));
    case NcclDataType::kUint8:
      return put(static_cast<std::uint8_t>(factor));
    case NcclDataType::kInt32:
      return put(static_cast<std::int32_t>(factor));
    case NcclDataType::kUint32:
      return put(static_cast<std::uint32_t>(factor));
    case NcclDataType::kInt64:
      return put(static_cast<std::int64_t>(factor));
    case NcclDataType::kUint64:
      return put(static_cast<std::uint64_t>(factor));
    case NcclDataType::kFloat16:
      return put(to_float16(static_cast<float>(factor)));
    case NcclDataType::kBfloat16:
      return put(to_bfloat16(static_cast<float>(factor)));
    case NcclDataType::kFloat32:
      return put(static_cast<float>(factor));
    case NcclDataType::kFloat64:
      return put(factor);
    case NcclDataType::kFloat8E4M3:
    case NcclDataType::kFloat8E5M2:
      break;
  }
  throw UsageError(
      concat("PREMUL_SUM of ", name(dtype), " is not supported: scale the tensor, then use SUM."));
}

}  // namespace horon
