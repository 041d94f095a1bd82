#include "nccl/nccl_dtype.h"

namespace horon {

std::optional<NcclDataType> nccl_dtype(DType dtype, Float8 float8) {
  switch (dtype) {
    case DType::kFloat16:
      return NcclDataType::kFloat16;
    case DType::kBFloat16:
      return NcclDataType::kBfloat16;
    case DType::kFloat32:
    case DType::kComplex64:
      return NcclDataType::kFloat32;
    case DType::kFloat64:
    case DType::kComplex128:
      return NcclDataType::kFloat64;
    case DType::kInt8:
      return NcclDataType::kInt8;
    case DType::kUInt8:
    case DType::kBool:
      return NcclDataType::kUint8;
    case DType::kInt32:
      return NcclDataType::kInt32;
    case DType::kUInt32:
      return NcclDataType::kUint32;
    case DType::kInt64:
      return NcclDataType::kInt64;
    case DType::kUInt64:
      return NcclDataType::kUint64;
    case DType::kInt16:
    case DType::kUInt16:
      return std::nullopt;
    case DType::kOpaque:
      break;
  }
  switch (float8) {
    case Float8::kE4M3:
      return NcclDataType::kFloat8E4M3;
    case Float8::kE5M2:
      return NcclDataType::kFloat8E5M2;
    case Float8::kNone:
      break;
  }
  return std::nullopt;
}

const char* name(NcclDataType dtype) {
  switch (dtype) {
    case NcclDataType::kInt8:
      return "int8";
    case NcclDataType::kUint8:
      return "uint8";
    case NcclDataType::kInt32:
      return "int32";
    case NcclDataType::kUint32:
      return "uint32";
    case NcclDataType::kInt64:
      return "int64";
    case NcclDataType::kUint64:
      return "uint64";
    case NcclDataType::kFloat16:
      return "float16";
    case NcclDataType::kFloat32:
      return "float32";
    case NcclDataType::kFloat64:
      return "float64";
    case NcclDataType::kBfloat16:
      return "bfloat16";
    case NcclDataType::kFloat8E4M3:
      return "float8_e4m3";
    case NcclDataType::kFloat8E5M2:
      return "float8_e5m2";
  }
  return "unknown";
}

std::size_t element_bytes(NcclDataType dtype) {
  switch (dtype) {
    case NcclDataType::kInt8:
    case NcclDataType::kUint8:
    case NcclDataType::kFloat8E4M3:
    case NcclDataType::kFloat8E5M2:
      return 1;
    case NcclDataType::kFloat16:
    case NcclDataType::kBfloat16:
      return 2;
    case NcclDataType::kInt32:
    case NcclDataType::kUint32:
    case NcclDataType::kFloat32:
      return 4;
    case NcclDataType::kInt64:
    case NcclDataType::kUint64:
    case NcclDataType::kFloat64:
      return 8;
  }
  return 0;
}

}  // namespace horon
