// Element types that a collective can carry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horon {

// The values are part of the arrival header that ranks exchange: append only.
enum class DType : uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kBool,
  kComplex64,
  kComplex128,
  kOpaque,  // Bytes that are moved and never reduced: float8, quantized types, pickled objects.
};

inline constexpr int kDTypeCount = 16;

// Size of one element. kOpaque counts in bytes, so its size is 1. A value outside the enum (a
// damaged header) gives 0.
size_t element_bytes(DType dtype);

// Signed or not; bool is none.
bool is_integer(DType dtype);
bool is_complex(DType dtype);

// torch's name without the prefix: "float32", "bool", "complex64"; "opaque"; "unknown" outside the
// enum.
const char* name(DType dtype);

}  // namespace horon
