#include "nccl_reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/half_bits.h"
#include "float8.h"

namespace horon::simulator {
namespace {

// How an element type is read, computed with and written.
template <class T>
struct Arithmetic {
  using Wide = T;
  static T wide(T value) { return value; }
  static T narrow(T value) { return value; }
  // Integers wrap, which is defined for unsigned ones alone.
  static T add(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
  static T multiply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

template <>
struct Arithmetic<Float16> : Arithmetic<float> {
  static float wide(Float16 value) { return to_float(value); }
  static Float16 narrow(float value) { return to_float16(value); }
};

template <>
struct Arithmetic<BFloat16> : Arithmetic<float> {
  static float wide(BFloat16 value) { return to_float(value); }
  static BFloat16 narrow(float value) { return to_bfloat16(value); }
};

template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct Arithmetic<Float8<kExponentBits, kMantissaBits, kHasInfinity>> : Arithmetic<float> {
  using Element = Float8<kExponentBits, kMantissaBits, kHasInfinity>;
  static float wide(Element value) { return value; }
  static Element narrow(float value) { return Element::from(value); }
};

template <class T>
T element(const Bytes& data, std::size_t i) {
  T value;
  std::memcpy(&value, data.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void reduce_as(const std::vector<Bytes>& inputs, ncclRedOp_t op, std::byte* result) {
  using Ops = Arithmetic<T>;
  using Wide = typename Ops::Wide;
  const auto n_ranks = static_cast<Wide>(inputs.size());
  const std::size_t count = inputs[0].size() / sizeof(T);
  for (std::size_t i = 0; i < count; ++i) {
    Wide total = Ops::wide(element<T>(inputs[0], i));
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      const Wide value = Ops::wide(element<T>(inputs[rank], i));
      switch (op) {
        case ncclProd:
          total = Ops::multiply(total, value);
          break;
        case ncclMax:
          total = std::max(total, value);
          break;
        case ncclMin:
          total = std::min(total, value);
          break;
        default:
          total = Ops::add(total, value);
      }
    }
    if (op == ncclAvg) {
      total = static_cast<Wide>(total / n_ranks);
    }
    const T narrow = Ops::narrow(total);
    std::memcpy(result + i * sizeof(T), &narrow, sizeof(T));
  }
}

template <class T>
void multiply_as(Bytes& data, const std::byte* scalar) {
  using Ops = Arithmetic<T>;
  T factor;
  std::memcpy(&factor, scalar, sizeof factor);
  for (std::size_t i = 0; i < data.size() / sizeof(T); ++i) {
    const T product = Ops::narrow(Ops::multiply(Ops::wide(element<T>(data, i)), Ops::wide(factor)));
    std::memcpy(data.data() + i * sizeof(T), &product, sizeof(T));
  }
}

// Calls visit with a value of the type that NCCL's number stands for.
template <class Visit>
void with_type(ncclDataType_t dtype, Visit&& visit) {
  switch (dtype) {
    case ncclInt8:
      return visit(std::int8_t{});
    case ncclUint8:
      return visit(std::uint8_t{});
    case ncclInt32:
      return visit(std::int32_t{});
    case ncclUint32:
      return visit(std::uint32_t{});
    case ncclInt64:
      return visit(std::int64_t{});
    case ncclUint64:
      return visit(std::uint64_t{});
    case ncclFloat16:
      return visit(Float16{});
    case ncclFloat32:
      return visit(float{});
    case ncclFloat64:
      return visit(double{});
    case ncclBfloat16:
      return visit(BFloat16{});
    case ncclFloat8e4m3:
      return visit(Float8E4M3{});
    case ncclFloat8e5m2:
      return visit(Float8E5M2{});
    default:
      return;  // no call with another one gets so far
  }
}

}  // namespace

std::size_t element_bytes(ncclDataType_t dtype) {
  std::size_t bytes = 0;
  with_type(dtype, [&bytes](auto value) { bytes = sizeof value; });
  return bytes;
}

void reduce(const std::vector<Bytes>& inputs, ncclDataType_t dtype, ncclRedOp_t op,
            std::byte* result) {
  with_type(dtype, [&](auto value) { reduce_as<decltype(value)>(inputs, op, result); });
}

void multiply(Bytes& data, ncclDataType_t dtype, const std::byte* scalar) {
  with_type(dtype, [&](auto value) { multiply_as<decltype(value)>(data, scalar); });
}

}  // namespace horon::simulator
