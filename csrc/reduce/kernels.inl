// The table of kernels of one instruction set. Included by kernels_*.cc and by nothing else; see
// Note [One source, several instruction sets] in kernel_table.h.
#pragma once

#include "reduce/half_codec.inl"
#include "reduce/half_passes.inl"
#include "reduce/kernel_table.h"
#include "reduce/parts.inl"
#include "reduce/passes.inl"

namespace horon {
namespace {

template <class Term, class Fold, class Finish>
constexpr ReduceKernel kKernel = &Passes<Term, Fold, Finish>::kernel;

struct TableBuilder {
  KernelTable table;

  constexpr explicit TableBuilder(const char* name) : table{name, {}} {}

  constexpr void set(DType dtype, ReduceOp op, ReduceKernel kernel, size_t units_per_element = 1) {
    table.entries[static_cast<int>(dtype)][static_cast<int>(op)] = {
        kernel, static_cast<uint8_t>(units_per_element)};
  }

  template <class Codec>
  constexpr void add_sums(DType dtype, size_t units_per_element) {
    set(dtype, ReduceOp::kSum, kKernel<Decoded<Codec>, Sum, Rounded<Codec>>, units_per_element);
    set(dtype, ReduceOp::kAvg, kKernel<Decoded<Codec>, Sum, FloatMean<Codec>>, units_per_element);
    set(dtype, ReduceOp::kPremulSum, kKernel<ScaledFloat<Codec>, Sum, Rounded<Codec>>,
        units_per_element);
  }

  template <class Codec>
  constexpr void add_float(DType dtype) {
    add_sums<Codec>(dtype, 1);
    set(dtype, ReduceOp::kProduct, kKernel<Decoded<Codec>, FloatProduct, Rounded<Codec>>);
    set(dtype, ReduceOp::kMin, kKernel<Decoded<Codec>, FloatMin, Rounded<Codec>>);
    set(dtype, ReduceOp::kMax, kKernel<Decoded<Codec>, FloatMax, Rounded<Codec>>);
  }

  template <class Vectors, class Codec>
  constexpr void add_half(DType dtype) {
    using Plain = Decoded<Codec>;
    using Once = Rounded<Codec>;
    set_half<Vectors, Sum, Scale::kNone, Divide::kNo, Plain, Once>(dtype, ReduceOp::kSum);
    set_half<Vectors, Sum, Scale::kNone, Divide::kByCount, Plain, FloatMean<Codec>>(dtype,
                                                                                    ReduceOp::kAvg);
    set_half<Vectors, Sum, Scale::kFactors, Divide::kNo, ScaledFloat<Codec>, Once>(
        dtype, ReduceOp::kPremulSum);
    set_half<Vectors, FloatProduct, Scale::kNone, Divide::kNo, Plain, Once>(dtype,
                                                                            ReduceOp::kProduct);
    set_half<Vectors, FloatMin, Scale::kNone, Divide::kNo, Plain, Once>(dtype, ReduceOp::kMin);
    set_half<Vectors, FloatMax, Scale::kNone, Divide::kNo, Plain, Once>(dtype, ReduceOp::kMax);
  }

  template <class Vectors, class Fold, Scale kScale, Divide kDivide, class Term, class Finish>
  constexpr void set_half(DType dtype, ReduceOp op) {
    set(dtype, op, &HalfPasses<Vectors, Fold, kScale, kDivide, Passes<Term, Fold, Finish>>::kernel);
  }

  // Sums and products wrap alike in signed and unsigned arithmetic, so the signed type uses the
  // unsigned one's kernels.
  template <class T, class Unsigned, class Wide>
  constexpr void add_integer(DType dtype) {
    using Modular = IntegerTerm<Unsigned, Unsigned>;
    using Ordered = IntegerTerm<T, T>;
    set(dtype, ReduceOp::kSum, kKernel<Modular, Sum, Stored<Unsigned>>);
    set(dtype, ReduceOp::kProduct, kKernel<Modular, IntegerProduct, Stored<Unsigned>>);
    set(dtype, ReduceOp::kAvg, kKernel<IntegerTerm<T, uint64_t>, Sum, IntegerMean<T, Wide>>);
    set(dtype, ReduceOp::kPremulSum, kKernel<ScaledInteger<T, Unsigned>, Sum, Stored<Unsigned>>);
    set(dtype, ReduceOp::kMin, kKernel<Ordered, IntegerMin, Stored<T>>);
    set(dtype, ReduceOp::kMax, kKernel<Ordered, IntegerMax, Stored<T>>);
    using Byte = IntegerTerm<uint8_t, uint8_t>;
    set(dtype, ReduceOp::kBand, kKernel<Byte, BitAnd, Stored<uint8_t>>, sizeof(T));
    set(dtype, ReduceOp::kBor, kKernel<Byte, BitOr, Stored<uint8_t>>, sizeof(T));
    set(dtype, ReduceOp::kBxor, kKernel<Byte, BitXor, Stored<uint8_t>>, sizeof(T));
  }

  constexpr void add_bool() {
    constexpr ReduceKernel any_true = kKernel<Truth, BitOr, Stored<uint8_t>>;
    constexpr ReduceKernel all_true = kKernel<Truth, BitAnd, Stored<uint8_t>>;
    set(DType::kBool, ReduceOp::kSum, any_true);
    set(DType::kBool, ReduceOp::kMax, any_true);
    set(DType::kBool, ReduceOp::kBor, any_true);
    set(DType::kBool, ReduceOp::kProduct, all_true);
    set(DType::kBool, ReduceOp::kMin, all_true);
    set(DType::kBool, ReduceOp::kBand, all_true);
    set(DType::kBool, ReduceOp::kBxor, kKernel<Truth, BitXor, Stored<uint8_t>>);
  }
};

constexpr KernelTable build_table(const char* name) {
  TableBuilder builder(name);
  builder.add_half<Float16Vectors, Float16Codec>(DType::kFloat16);
  builder.add_half<BFloat16Vectors, BFloat16Codec>(DType::kBFloat16);
  builder.add_float<FloatCodec<float>>(DType::kFloat32);
  builder.add_float<FloatCodec<double>>(DType::kFloat64);
  builder.add_integer<int8_t, uint8_t, int64_t>(DType::kInt8);
  builder.add_integer<uint8_t, uint8_t, uint64_t>(DType::kUInt8);
  builder.add_integer<int16_t, uint16_t, int64_t>(DType::kInt16);
  builder.add_integer<uint16_t, uint16_t, uint64_t>(DType::kUInt16);
  builder.add_integer<int32_t, uint32_t, int64_t>(DType::kInt32);
  builder.add_integer<uint32_t, uint32_t, uint64_t>(DType::kUInt32);
  builder.add_integer<int64_t, uint64_t, int64_t>(DType::kInt64);
  builder.add_integer<uint64_t, uint64_t, uint64_t>(DType::kUInt64);
  builder.add_bool();
  builder.add_sums<FloatCodec<float>>(DType::kComplex64, 2);
  builder.add_sums<FloatCodec<double>>(DType::kComplex128, 2);
  return builder.table;
}

}  // namespace
}  // namespace horon
