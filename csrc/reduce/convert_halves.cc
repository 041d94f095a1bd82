#include "reduce/convert_halves.h"

#include <cstdint>
#include <cstring>

#include "reduce/half_codec.inl"

namespace horon {
namespace {

template <class From, class To, To (*kConvert)(From)>
void convert(const char* from, char* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    const To converted = kConvert(value);
    std::memcpy(to + i * sizeof converted, &converted, sizeof converted);
  }
}

template <class Codec>
constexpr auto kWiden = convert<uint16_t, float, Codec::decode>;
template <class Codec>
constexpr auto kRound = convert<float, uint16_t, Codec::encode>;

}  // namespace

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void widen_halves(DType dtype, const void* from, void* to, size_t count) {
  (dtype == DType::kFloat16
       ? kWiden<Float16Codec>
       : kWiden<BFloat16Codec>)(static_cast<const char*>(from), static_cast<char*>(to), count);
}

void round_to_halves(DType dtype, const void* from, void* to, size_t count) {
  (dtype == DType::kFloat16
       ? kRound<Float16Codec>
       : kRound<BFloat16Codec>)(static_cast<const char*>(from), static_cast<char*>(to), count);
}

}  // namespace horon
