// float16 and bfloat16 to float32 and back, in branch-free integer arithmetic, for one element or a
// vector of them. Part of kernels.inl; see Note [One source, several instruction sets].
//
// Int is int32_t and Float is float, or both are vectors of such. A half comes in the low 16 bits
// (what is above is ignored) and leaves there (with zeros above). encode() makes every NaN the
// canonical one, before it rounds; see Note [What the arithmetic promises]. Choices are made with
// masks because baseline x86 has no blend, and without if-conversion a scalar tail would branch.
#pragma once

#include <cstdint>

namespace horon {
namespace {

// All ones if a < b, else zero. Requires that a - b does not overflow.
template <class Int>
inline Int mask_less(Int a, Int b) {
  return (a - b) >> 31;
}

template <class Int>
inline Int choose(Int mask, Int if_set, Int otherwise) {
  return otherwise ^ ((if_set ^ otherwise) & mask);
}

template <class Int>
inline Int splat(int32_t value) {
  return value - Int{};
}

// See Note [What the arithmetic promises].
template <class Float>
inline Float canonical(Float value) {
  return value == value ? value : __builtin_nanf("") - Float{};
}

struct BFloat16Bits {
  template <class Int, class Float>
  static Float decode(Int half) {
    return __builtin_bit_cast(Float, half << 16);
  }

  // The result is in the upper half; the lower half is not clean.
  template <class Int, class Float>
  static Int round(Float value) {
    const Int bits = __builtin_bit_cast(Int, canonical(value));
    // Rounds to even by adding half of the last kept bit, less one if that bit is even. A carry
    // goes into the exponent, which is right, up to infinity.
    return bits + ((bits >> 16) & 1) + 0x7fff;
  }

  template <class Int, class Float>
  static Int encode(Float value) {
    return (round<Int>(value) >> 16) & 0xffff;
  }

  // Two results in one word.
  template <class Int, class Float>
  static Int encode_pair(Float low, Float high) {
    return encode<Int>(low) | (round<Int>(high) & -0x10000);
  }
};

struct Float16Bits {
  static constexpr int32_t kRebias = 112 << 23;

  template <class Int, class Float>
  static Float decode(Int half) {
    const Int magnitude = half & 0x7fff;
    const Int shifted = magnitude << 13;
    const Int is_special = mask_less(splat<Int>(0x7bff), magnitude);
    const Int normal =
        shifted + kRebias + (is_special & kRebias);  // Infinity and NaN: rebiased twice.
    // A denormal gets the implicit one of 2^-14, which is then subtracted. No float32 denormal
    // takes part, so flushing them changes nothing.
    const Float implicit_one = __builtin_bit_cast(Float, splat<Int>(113 << 23));
    const Int denormal =
        __builtin_bit_cast(Int, __builtin_bit_cast(Float, shifted + (113 << 23)) - implicit_one);
    const Int sign = (half & 0x8000) << 16;
    return __builtin_bit_cast(
        Float, sign | choose(mask_less(magnitude, splat<Int>(0x0400)), denormal, normal));
  }

  template <class Int, class Float>
  static Int encode(Float value) {
    const Int bits = __builtin_bit_cast(Int, value);
    const Int magnitude = bits & 0x7fffffff;
    // Rounds as above; what passes the largest number is infinity.
    const Int rounded = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Int normal = choose(mask_less(rounded, splat<Int>(0x7c00)), rounded, splat<Int>(0x7c00));
    // Beside 0.5 the last bit of a float32 is worth 2^-24, as a float16 denormal's: the addition
    // rounds as we need.
    const Int denormal =
        __builtin_bit_cast(Int, __builtin_bit_cast(Float, magnitude) + 0.5f) - 0x3f000000;
    const Int number = choose(mask_less(magnitude, splat<Int>(0x38800000)), denormal, normal);
    const Int is_nan = mask_less(splat<Int>(0x7f800000), magnitude);
    return choose(is_nan, splat<Int>(0x7e00), ((bits >> 16) & 0x8000) | number);
  }

  template <class Int, class Float>
  static Int encode_pair(Float low, Float high) {
    return encode<Int>(low) | (encode<Int>(high) << 16);
  }
};

// The form that Passes takes.
template <class Bits>
struct HalfCodec {
  using Element = uint16_t;
  using Acc = float;
  static float decode(uint16_t half) { return Bits::template decode<int32_t, float>(half); }
  static uint16_t encode(float value) {
    return static_cast<uint16_t>(Bits::template encode<int32_t>(value));
  }
};

using Float16Codec = HalfCodec<Float16Bits>;
using BFloat16Codec = HalfCodec<BFloat16Bits>;

}  // namespace
}  // namespace horon
