#include "reduce/convert_halves.h"

#include <cstdint>
#include <cstring>

#include "reduce/half_codec.inl"

namespace horon {
namespace {

template <class Codec>
void widen(const char* from, char* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, from + i * sizeof half, sizeof half);
    const float value = Codec::decode(half);
    std::memcpy(to + i * sizeof value, &value, sizeof value);
  }
}

template <class Codec>
void round(const char* from, char* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    const uint16_t half = Codec::encode(value);
    std::memcpy(to + i * sizeof half, &half, sizeof half);
  }
}

}  // namespace

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void widen_halves(DType dtype, const void* from, void* to, size_t count) {
  (dtype == DType::kFloat16
       ? widen<Float16Codec>
       : widen<BFloat16Codec>)(static_cast<const char*>(from), static_cast<char*>(to), count);
}

void round_to_halves(DType dtype, const void* from, void* to, size_t count) {
  (dtype == DType::kFloat16
       ? round<Float16Codec>
       : round<BFloat16Codec>)(static_cast<const char*>(from), static_cast<char*>(to), count);
}

}  // namespace horon
