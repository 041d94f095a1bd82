// The engine's element types as NCCL's. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/dtype.h"
#include "nccl/nccl_types.h"

namespace horon {

// Which 8-bit float an element of DType::kOpaque is: NCCL reduces these two, the CPU none.
enum class Float8 : std::uint8_t { kNone, kE4M3, kE5M2 };

// Nothing where NCCL has no arithmetic for the type: 16-bit integers and opaque bytes. Complex
// elements count as two of their parts, bool as uint8. What is only moved needs no type: it is
// moved as bytes.
std::optional<NcclDataType> nccl_dtype(DType dtype, Float8 float8);

// "float32"; for messages.
const char* name(NcclDataType dtype);

std::size_t element_bytes(NcclDataType dtype);

}  // namespace horon
