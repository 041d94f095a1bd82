// A reduction in two steps: over the ranks of each host, and then over what the hosts have.
//
// Note [Two steps]
// What the first step makes must be all that the second needs: float16 and bfloat16 become float32
// before it and are rounded once, at the very end; AVG adds, and divides at the end; PREMUL_SUM
// multiplies in the first step alone. The ranks of a host are folded in their order, and hosts in
// the order of their first ranks. So a result has the same bits on every rank and from run to run,
// but where the order of additions matters, not those that it would have within one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace horon {

struct TwoSteps {
  DType result = DType::kFloat32;
  DType between = DType::kFloat32;  // what the first step takes and makes
  ReduceOp first = ReduceOp::kSum;
  ReduceOp second = ReduceOp::kSum;
  int divisor = 1;

  bool widens() const { return result != between; }
};

// Nothing where one step has to do: AVG of integers adds with more bits than it brings. Requires
// is_reducible(dtype, op).
std::optional<TwoSteps> two_steps(DType dtype, ReduceOp op, int n_ranks);

// The second step, and what comes after it: `count` elements of each source, one for each host, in
// `between`, become as many in `result`. `scratch`, for `count` elements of `between`, is used
// where widens().
void take_second_step(const TwoSteps& steps, void* result, void* scratch,
                      const void* const* sources, int n_sources, std::size_t count);

}  // namespace horon
