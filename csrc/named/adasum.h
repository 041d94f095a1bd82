// Adasum: a sum that takes away what its parts have in common.
#pragma once

#include <cstddef>
#include <vector>

#include "core/dtype.h"

namespace horon {

// Adasum needs this many ranks to be a power of two.
constexpr bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

bool has_adasum(DType dtype);

// Combines one tensor per rank into parts[0]; the others are overwritten. Pairs of neighbours
// first, then pairs of pairs: a and b become
//   (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b.
// Products are summed in double, in order, so that all ranks get the same bits.
// Requires a power of two of parts, and has_adasum(dtype).
// Source: Horovod's algorithm (https://arxiv.org/abs/2006.02924).
void combine_adasum(const std::vector<std::byte*>& parts, std::size_t count, DType dtype);

}  // namespace horon
