#include "named/adasum.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/error.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

double float16_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const double fraction = bits & 0x3ff;
  double value = 0;
  if (exponent == 0x1f) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(fraction + 1024, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

struct Float16 {
  std::uint16_t bits;
  double value() const { return float16_value(bits); }
};
struct BFloat16 {
  std::uint16_t bits;
  double value() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};
struct Float32 {
  float bits;
  double value() const { return bits; }
};
struct Float64 {
  double bits;
  double value() const { return bits; }
};

struct Products {
  double aa = 0;
  double bb = 0;
  double ab = 0;
};

template <typename T>
Products products(const void* a, const void* b, std::size_t count) {
  const T* x = static_cast<const T*>(a);
  const T* y = static_cast<const T*>(b);
  Products sums;
  for (std::size_t i = 0; i < count; ++i) {
    const double u = x[i].value();
    const double v = y[i].value();
    sums.aa += u * u;
    sums.bb += v * v;
    sums.ab += u * v;
  }
  return sums;
}

Products products(const void* a, const void* b, std::size_t count, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return products<Float16>(a, b, count);
    case DType::kBFloat16:
      return products<BFloat16>(a, b, count);
    case DType::kFloat32:
      return products<Float32>(a, b, count);
    case DType::kFloat64:
      return products<Float64>(a, b, count);
    default:
      throw UsageError(concat("Adasum is not defined for ", name(dtype)));
  }
}

// What is left of a vector that has `common` with the other one; all of a vector of zeros.
double share(double common, double own) {
  static const double smallest = std::sqrt(std::numeric_limits<double>::min());
  return own >= smallest ? 1.0 - common / own * 0.5 : 1.0;
}

}  // namespace

bool has_adasum(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

void combine_adasum(const std::vector<std::byte*>& parts, std::size_t count, DType dtype) {
  for (std::size_t distance = 1; distance < parts.size(); distance *= 2) {
    for (std::size_t i = 0; i + distance < parts.size(); i += 2 * distance) {
      const Products sums = products(parts[i], parts[i + distance], count, dtype);
      const double factors[2] = {share(sums.ab, sums.aa), share(sums.ab, sums.bb)};
      const void* const sources[2] = {parts[i], parts[i + distance]};
      reduce(parts[i], sources, 2, count, dtype, ReduceOp::kPremulSum, factors);
    }
  }
}

}  // namespace horon
