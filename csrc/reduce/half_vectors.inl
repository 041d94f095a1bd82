// float16 and bfloat16 by the vector. Part of kernels.inl; see Note [One source, several
// instruction sets].
//
// Written with the compilers' vector types instead of being left to their loop vectoriser: that
// widens 16 bits to 32 and back with shuffles, which cost more than the arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/half_codec.inl"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace horon {
namespace {

#if defined(__AVX2__)
#define HORON_VECTOR_BYTES 32
#else
#define HORON_VECTOR_BYTES 16
#endif
typedef int32_t IntVector __attribute__((vector_size(HORON_VECTOR_BYTES)));
typedef float FloatVector __attribute__((vector_size(HORON_VECTOR_BYTES)));

// As many elements as two FloatVectors hold. Which element is where is the codec's affair.
struct HalfVector {
  FloatVector first, second;
};

inline constexpr size_t kHalfVectorCount = 2 * HORON_VECTOR_BYTES / sizeof(float);

inline FloatVector splat_float(float value) { return value - FloatVector{}; }

// A 32-bit word holds two elements: the low ones make the first vector, the high ones the second.
template <class Bits>
struct HalfWords {
  static HalfVector decode(const void* from) {
    IntVector words;
    __builtin_memcpy(&words, from, sizeof(words));
    return {Bits::template decode<IntVector, FloatVector>(words),
            Bits::template decode<IntVector, FloatVector>(words >> 16)};
  }

  static void encode(void* to, const HalfVector& v) {
    const IntVector words = Bits::template encode_pair<IntVector>(v.first, v.second);
    __builtin_memcpy(to, &words, sizeof(words));
  }
};

// AVX512_BF16's own rounding is of no use: it flushes denormals.
using BFloat16Vectors = HalfWords<BFloat16Bits>;

#if defined(__F16C__) && defined(__AVX2__)

// The CPU's own conversions. Same bits as Float16Bits: decoding is exact, rounding is to nearest
// even (by the immediate, not by the environment), and NaN is made canonical first.
struct Float16Vectors {
  static HalfVector decode(const void* from) {
    const auto* halves = static_cast<const __m128i_u*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }

  static __m128i round(FloatVector v) {
    return _mm256_cvtps_ph(canonical(v), _MM_FROUND_TO_NEAREST_INT);
  }

  static void encode(void* to, const HalfVector& v) {
    auto* halves = static_cast<__m128i_u*>(to);
    _mm_storeu_si128(halves, round(v.first));
    _mm_storeu_si128(halves + 1, round(v.second));
  }
};

#else

using Float16Vectors = HalfWords<Float16Bits>;

#endif

}  // namespace
}  // namespace horon
