// float16 and bfloat16 to float32 and back, as reduce() does it before and after its arithmetic.
#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace horon {

bool is_half(DType dtype);

// Require is_half(dtype). No alignment is needed; from and to do not overlap. Never block, never
// allocate.
void widen_halves(DType dtype, const void* from, void* to, size_t count);
void round_to_halves(DType dtype, const void* from, void* to, size_t count);

}  // namespace horon
