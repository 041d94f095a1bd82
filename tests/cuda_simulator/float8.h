// The two 8-bit floating-point types, to float and back. Finite values beyond the largest become
// it, as CUDA's conversions that saturate do.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace horon::simulator {

// E4M3 has no infinity and one NaN; E5M2 has the values of IEEE's formats.
template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct Float8 {
  std::uint8_t bits = 0;

  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMaxExponent = (1 << kExponentBits) - 1;
  static constexpr int kOne = 1 << kMantissaBits;
  static constexpr std::uint8_t kNan = 0x7f;
  static constexpr std::uint8_t kInfinity = kMaxExponent << kMantissaBits;
  static constexpr std::uint8_t kLargest = kHasInfinity ? kInfinity - 1 : kNan - 1;

  operator float() const {
    const int magnitude = bits & 0x7f;
    const int exponent = magnitude >> kMantissaBits;
    const int mantissa = magnitude & (kOne - 1);
    float value = 0;
    if (kHasInfinity && exponent == kMaxExponent) {
      value = mantissa == 0 ? std::numeric_limits<float>::infinity()
                            : std::numeric_limits<float>::quiet_NaN();
    } else if (!kHasInfinity && magnitude == kNan) {
      value = std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissaBits);
    } else {
      value = std::ldexp(static_cast<float>(mantissa + kOne), exponent - kBias - kMantissaBits);
    }
    return (bits & 0x80) != 0 ? -value : value;
  }

  static Float8 from(float value) {
    const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) {
      return {static_cast<std::uint8_t>(sign | kNan)};
    }
    const float magnitude = std::fabs(value);
    if (magnitude >= static_cast<float>(Float8{kLargest})) {
      return {static_cast<std::uint8_t>(sign | kLargest)};
    }
    if (magnitude == 0) {
      return {sign};
    }
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude in [2^(exponent-1), 2^exponent)
    const int lowest = 1 - kBias;
    const int unit = (exponent - 1 < lowest ? lowest : exponent - 1) - kMantissaBits;
    // To nearest, ties to even: the default mode of rounding.
    const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
    // A carry out of the mantissa goes to the exponent by itself.
    const int encoded = ((unit + kMantissaBits - lowest) << kMantissaBits) + units;
    return {static_cast<std::uint8_t>(sign | encoded)};
  }
};

using Float8E4M3 = Float8<4, 3, false>;
using Float8E5M2 = Float8<5, 2, true>;

}  // namespace horon::simulator
