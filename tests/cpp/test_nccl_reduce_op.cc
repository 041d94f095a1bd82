#include "nccl/nccl_reduce_op.h"

#include <cstring>

#include "catch.h"
#include "core/error.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

NcclReduction reduction(DType dtype, ReduceOp op, Float8 float8 = Float8::kNone) {
  return nccl_reduction(OpKind::kAllReduce, dtype, float8, op, 0.5);
}

template <class T>
T factor_as(NcclDataType dtype, double factor) {
  const NcclFactor stored = nccl_factor(dtype, factor);
  T value;
  std::memcpy(&value, stored.bytes.data(), sizeof value);
  return value;
}

}  // namespace

TEST_CASE("NCCL dtype: every type has one, or is known to have none") {
  using Nccl = NcclDataType;
  const std::optional<Nccl> expected[kDTypeCount] = {
      Nccl::kFloat16, Nccl::kBfloat16, Nccl::kFloat32, Nccl::kFloat64, Nccl::kInt8,  Nccl::kUint8,
      std::nullopt,   std::nullopt,    Nccl::kInt32,   Nccl::kUint32,  Nccl::kInt64, Nccl::kUint64,
      Nccl::kUint8,   Nccl::kFloat32,  Nccl::kFloat64, std::nullopt};
  for (int code = 0; code < kDTypeCount; ++code) {
    const auto dtype = static_cast<DType>(code);
    INFO(name(dtype));
    const auto nccl = nccl_dtype(dtype, Float8::kNone);
    REQUIRE(nccl == expected[code]);
    if (nccl) {
      const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
      REQUIRE(element_bytes(dtype) == element_bytes(*nccl) * (is_complex ? 2 : 1));
    }
  }
  REQUIRE(nccl_dtype(DType::kOpaque, Float8::kE4M3) == Nccl::kFloat8E4M3);
  REQUIRE(nccl_dtype(DType::kOpaque, Float8::kE5M2) == Nccl::kFloat8E5M2);
  REQUIRE(nccl_dtype(DType::kInt16, Float8::kE5M2) == std::nullopt);
}

TEST_CASE("NCCL reduce op: those of numbers are NCCL's own") {
  const std::pair<ReduceOp, NcclReduceOp> pairs[] = {{ReduceOp::kSum, NcclReduceOp::kSum},
                                                     {ReduceOp::kAvg, NcclReduceOp::kAvg},
                                                     {ReduceOp::kProduct, NcclReduceOp::kProduct},
                                                     {ReduceOp::kMin, NcclReduceOp::kMin},
                                                     {ReduceOp::kMax, NcclReduceOp::kMax}};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8}) {
    for (const auto& [op, expected] : pairs) {
      REQUIRE(reduction(dtype, op).op == expected);
      REQUIRE_FALSE(reduction(dtype, op).has_factor);
      REQUIRE(reduction(dtype, op).parts_per_element == 1);
    }
  }
  const NcclReduction premul = reduction(DType::kFloat16, ReduceOp::kPremulSum);
  REQUIRE(premul.has_factor);
  REQUIRE(premul.factor == 0.5);
  REQUIRE(reduction(DType::kOpaque, ReduceOp::kSum, Float8::kE4M3).dtype ==
          NcclDataType::kFloat8E4M3);
}

TEST_CASE("NCCL reduce op: sums of bool are a logical or, products a logical and") {
  REQUIRE(reduction(DType::kBool, ReduceOp::kSum).op == NcclReduceOp::kMax);
  REQUIRE(reduction(DType::kBool, ReduceOp::kMax).op == NcclReduceOp::kMax);
  REQUIRE(reduction(DType::kBool, ReduceOp::kProduct).op == NcclReduceOp::kMin);
  REQUIRE(reduction(DType::kBool, ReduceOp::kMin).op == NcclReduceOp::kMin);
  REQUIRE(reduction(DType::kBool, ReduceOp::kSum).dtype == NcclDataType::kUint8);
  REQUIRE_THROWS_AS(reduction(DType::kBool, ReduceOp::kAvg), UsageError);
  REQUIRE_THROWS_AS(reduction(DType::kBool, ReduceOp::kPremulSum), UsageError);
}

TEST_CASE("NCCL reduce op: complex numbers are summed by their parts, and only summed") {
  for (const DType dtype : {DType::kComplex64, DType::kComplex128}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum}) {
      REQUIRE(reduction(dtype, op).parts_per_element == 2);
    }
    for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      REQUIRE_THROWS_AS(reduction(dtype, op), UsageError);
    }
  }
}

TEST_CASE("NCCL reduce op: what NCCL lacks is refused by name") {
  for (const ReduceOp op : {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor}) {
    REQUIRE_THROWS_AS(reduction(DType::kInt32, op), UsageError);
  }
  const auto error = error_of([] { reduction(DType::kInt16, ReduceOp::kSum); });
  REQUIRE(threw<UsageError>(error));
  REQUIRE(contains(text_of(error), "all_reduce: NCCL has no SUM for tensors of int16"));
  REQUIRE_THROWS_AS(reduction(DType::kOpaque, ReduceOp::kMax), UsageError);
  REQUIRE_THROWS_AS(reduction(DType::kOpaque, ReduceOp::kPremulSum, Float8::kE4M3), UsageError);
}

TEST_CASE("NCCL factor: one element of the type") {
  REQUIRE(factor_as<double>(NcclDataType::kFloat64, 0.1) == 0.1);
  REQUIRE(factor_as<float>(NcclDataType::kFloat32, 0.1) == 0.1F);
  REQUIRE(factor_as<std::uint16_t>(NcclDataType::kFloat16, 0.5) == 0x3800);
  REQUIRE(factor_as<std::uint16_t>(NcclDataType::kBfloat16, 0.5) == 0x3f00);
  REQUIRE(factor_as<std::int8_t>(NcclDataType::kInt8, -3.9) == -3);
  REQUIRE(factor_as<std::int64_t>(NcclDataType::kInt64, 1e15) == 1000000000000000);
}
