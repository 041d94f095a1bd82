#include "dtype_bridge.h"

namespace horon::torch_backend {

DType to_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
      return DType::kFloat16;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Float:
      return DType::kFloat32;
    case c10::ScalarType::Double:
      return DType::kFloat64;
    case c10::ScalarType::Char:
      return DType::kInt8;
    case c10::ScalarType::Byte:
      return DType::kUInt8;
    case c10::ScalarType::Short:
      return DType::kInt16;
    case c10::ScalarType::UInt16:
      return DType::kUInt16;
    case c10::ScalarType::Int:
      return DType::kInt32;
    case c10::ScalarType::UInt32:
      return DType::kUInt32;
    case c10::ScalarType::Long:
      return DType::kInt64;
    case c10::ScalarType::UInt64:
      return DType::kUInt64;
    case c10::ScalarType::Bool:
      return DType::kBool;
    case c10::ScalarType::ComplexFloat:
      return DType::kComplex64;
    case c10::ScalarType::ComplexDouble:
      return DType::kComplex128;
    default:
      return DType::kOpaque;
  }
}

Float8 float8_of(std::uint8_t type_code) {
  switch (static_cast<c10::ScalarType>(type_code)) {
    case c10::ScalarType::Float8_e4m3fn:
      return Float8::kE4M3;
    case c10::ScalarType::Float8_e5m2:
      return Float8::kE5M2;
    default:
      return Float8::kNone;
  }
}

Reduction to_reduction(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return {ReduceOp::kSum};
    case c10d::ReduceOp::AVG:
      return {ReduceOp::kAvg};
    case c10d::ReduceOp::PRODUCT:
      return {ReduceOp::kProduct};
    case c10d::ReduceOp::MIN:
      return {ReduceOp::kMin};
    case c10d::ReduceOp::MAX:
      return {ReduceOp::kMax};
    case c10d::ReduceOp::BAND:
      return {ReduceOp::kBand};
    case c10d::ReduceOp::BOR:
      return {ReduceOp::kBor};
    case c10d::ReduceOp::BXOR:
      return {ReduceOp::kBxor};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* premul = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK_VALUE(premul != nullptr, "horon: PREMUL_SUM needs a factor; make it with ",
                        "torch.distributed._make_nccl_premul_sum.");
      const double factor = premul->tensor_factor.defined()
                                ? premul->tensor_factor.item().toDouble()
                                : premul->double_factor;
      return {ReduceOp::kPremulSum, factor};
    }
    default:
      TORCH_CHECK_VALUE(false, "horon: reduce op ", static_cast<int>(op.op_), " is not supported.");
  }
}

}  // namespace horon::torch_backend
