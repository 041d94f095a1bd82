// What reduce() must compute, in the plainest code: one element at a time, no table, no bit tricks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace horon::reference {

template <class T>
T get(const void* base, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(void* base, size_t i, T value) {
  std::memcpy(static_cast<char*>(base) + i * sizeof(T), &value, sizeof(T));
}

// An IEEE format of 16 bits, by its definition.
struct HalfFormat {
  int mantissa_bits, exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int special_exponent() const { return (1 << exponent_bits) - 1; }

  float decode(uint16_t half) const {
    const int mantissa = half & ((1 << mantissa_bits) - 1);
    const int exponent = (half >> mantissa_bits) & special_exponent();
    double value;
    if (exponent == special_exponent()) {
      value = mantissa != 0 ? std::nan("") : HUGE_VAL;
    } else if (exponent == 0) {
      value = std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    } else {
      value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
    }
    return static_cast<float>((half & 0x8000) != 0 ? -value : value);
  }

  uint16_t encode(float value) const {
    if (std::isnan(value))
      return static_cast<uint16_t>((special_exponent() << mantissa_bits) |
                                   (1 << (mantissa_bits - 1)));
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const int infinity = special_exponent() << mantissa_bits;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
    int exponent = magnitude == 0 ? 1 - bias() : std::max(std::ilogb(magnitude), 1 - bias());
    // nearbyint rounds halves to even; 2^mantissa_bits is the implicit one.
    const int significand =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    const int biased = significand < (1 << mantissa_bits) ? 0 : exponent + bias() - 1;
    return static_cast<uint16_t>(sign |
                                 std::min(infinity, (biased << mantissa_bits) + significand));
  }
};

inline constexpr HalfFormat kFloat16{10, 5};
inline constexpr HalfFormat kBFloat16{7, 8};

template <class T>
T fold_real(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : b < a ? b : a;
    case ReduceOp::kMax:
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : b > a ? b : a;
    default:
      return a + b;
  }
}

template <class T>
T real_element(const std::vector<T>& values, ReduceOp op, const double* factors) {
  T acc = 0;
  for (size_t r = 0; r < values.size(); ++r) {
    const T value = op == ReduceOp::kPremulSum ? static_cast<T>(factors[r]) * values[r] : values[r];
    acc = r == 0 ? value : fold_real(op, acc, value);
  }
  return op == ReduceOp::kAvg ? acc / static_cast<T>(values.size()) : acc;
}

template <class T>
T scaled_integer(T value, double factor) {
  const double product = std::trunc(static_cast<double>(value) * factor);
  if (std::isnan(product)) return 0;
  // long double holds every 64-bit integer, on x86-64 and on arm64.
  if (product <= static_cast<long double>(std::numeric_limits<T>::min()))
    return std::numeric_limits<T>::min();
  if (product >= static_cast<long double>(std::numeric_limits<T>::max()))
    return std::numeric_limits<T>::max();
  return static_cast<T>(product);
}

// T's arithmetic done in 64 bits: what wraps there, wraps in T too.
template <class T>
T integer_element(const std::vector<T>& values, ReduceOp op, const double* factors) {
  uint64_t acc = 0;
  for (size_t r = 0; r < values.size(); ++r) {
    const T value = op == ReduceOp::kPremulSum ? scaled_integer(values[r], factors[r]) : values[r];
    const uint64_t wide = static_cast<uint64_t>(value);
    const T so_far = static_cast<T>(acc);
    if (r == 0)
      acc = wide;
    else if (op == ReduceOp::kProduct)
      acc *= wide;
    else if (op == ReduceOp::kMin)
      acc = value < so_far ? wide : acc;
    else if (op == ReduceOp::kMax)
      acc = value > so_far ? wide : acc;
    else if (op == ReduceOp::kBand)
      acc &= wide;
    else if (op == ReduceOp::kBor)
      acc |= wide;
    else if (op == ReduceOp::kBxor)
      acc ^= wide;
    else
      acc += wide;
  }
  if (op != ReduceOp::kAvg) return static_cast<T>(acc);
  if (std::numeric_limits<T>::is_signed)
    return static_cast<T>(static_cast<int64_t>(acc) / static_cast<int64_t>(values.size()));
  return static_cast<T>(acc / values.size());
}

inline uint8_t bool_element(const std::vector<uint8_t>& values, ReduceOp op) {
  size_t n_true = 0;
  for (uint8_t value : values) n_true += value != 0;
  if (op == ReduceOp::kBxor) return n_true % 2;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBor) return n_true > 0;
  return n_true == values.size();
}

template <class T, class Element>
void each_element(void* dst, const std::vector<const void*>& sources, size_t count,
                  Element element) {
  std::vector<T> values(sources.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t r = 0; r < sources.size(); ++r) values[r] = get<T>(sources[r], i);
    put<T>(dst, i, element(values));
  }
}

// Requires: dst overlaps no source. More than one source, or PREMUL_SUM: a copy is tested as a
// copy.
inline void reduce(void* dst, const std::vector<const void*>& sources, size_t count, DType dtype,
                   ReduceOp op, const double* factors) {
  const auto half = [&](const HalfFormat& format) {
    std::vector<float> values(sources.size());
    each_element<uint16_t>(dst, sources, count, [&](const std::vector<uint16_t>& halves) {
      for (size_t r = 0; r < halves.size(); ++r) values[r] = format.decode(halves[r]);
      return format.encode(real_element(values, op, factors));
    });
  };
  const auto real = [&](auto zero, size_t parts) {
    using T = decltype(zero);
    each_element<T>(dst, sources, count * parts,
                    [&](const auto& v) { return real_element<T>(v, op, factors); });
  };
  const auto integer = [&](auto zero) {
    using T = decltype(zero);
    each_element<T>(dst, sources, count,
                    [&](const auto& v) { return integer_element<T>(v, op, factors); });
  };
  switch (dtype) {
    case DType::kFloat16:
      return half(kFloat16);
    case DType::kBFloat16:
      return half(kBFloat16);
    case DType::kFloat32:
      return real(float{}, 1);
    case DType::kFloat64:
      return real(double{}, 1);
    case DType::kComplex64:
      return real(float{}, 2);
    case DType::kComplex128:
      return real(double{}, 2);
    case DType::kInt8:
      return integer(int8_t{});
    case DType::kUInt8:
      return integer(uint8_t{});
    case DType::kInt16:
      return integer(int16_t{});
    case DType::kUInt16:
      return integer(uint16_t{});
    case DType::kInt32:
      return integer(int32_t{});
    case DType::kUInt32:
      return integer(uint32_t{});
    case DType::kInt64:
      return integer(int64_t{});
    case DType::kUInt64:
      return integer(uint64_t{});
    case DType::kBool:
      return each_element<uint8_t>(dst, sources, count,
                                   [&](const auto& v) { return bool_element(v, op); });
    case DType::kOpaque:
      return;
  }
}

}  // namespace horon::reference
