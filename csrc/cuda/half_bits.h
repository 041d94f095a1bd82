// float16 and bfloat16, as 16 bits, to float and back: instructions of the GPU in kernels, integer
// arithmetic elsewhere. Both round to nearest even and give the same bits; every NaN becomes the
// canonical one.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/host_device.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace horon {

struct Float16 {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

namespace half_bits {

inline constexpr std::uint32_t kSignBit = 0x80000000;
inline constexpr std::uint32_t kInfinity = 0x7f800000;
inline constexpr std::uint16_t kCanonicalNan = 0x7fff;

HORON_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

HORON_HOST_DEVICE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace half_bits

HORON_HOST_DEVICE float to_float(Float16 half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half.bits));
#else
  using namespace half_bits;
  const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = half.bits & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity or NaN
    return float_of(sign | kInfinity | ((magnitude & 0x3ffU) << 13));
  }
  if (magnitude < 0x400U) {  // zero or subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return float_of(sign | bits_of(value));
  }
  return float_of(sign | ((magnitude << 13) + (112U << 23)));  // 112: the biases' difference
#endif
}

HORON_HOST_DEVICE Float16 to_float16(float value) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  using namespace half_bits;
  const std::uint32_t bits = bits_of(value);
  const auto sign = static_cast<std::uint16_t>((bits & kSignBit) >> 16);
  const std::uint32_t magnitude = bits & ~kSignBit;
  if (magnitude > kInfinity) {
    return {kCanonicalNan};
  }
  std::uint32_t rounded;
  if (magnitude >= 0x477ff000U) {  // 65520 and above round to infinity
    rounded = 0x7c00U;
  } else if (magnitude < 0x38800000U) {
    // Below 2^-14 the result is a multiple of 2^-24, the last place of 0.5: adding 0.5 rounds.
    rounded = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
  } else {
    rounded = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | rounded)};
#endif
}

HORON_HOST_DEVICE float to_float(BFloat16 half) {
  return half_bits::float_of(static_cast<std::uint32_t>(half.bits) << 16);
}

HORON_HOST_DEVICE BFloat16 to_bfloat16(float value) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  using namespace half_bits;
  const std::uint32_t bits = bits_of(value);
  if ((bits & ~kSignBit) > kInfinity) {
    return {kCanonicalNan};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
#endif
}

}  // namespace horon
