// Element-wise reduction of n arrays into one: the arithmetic of every CPU collective.
//
// Note [What the arithmetic promises]
// dst[i] is a fold over sources[0][i], sources[1][i], ... in that order, whatever count, chunking,
// alignment and instruction set are: the same inputs give the same bits on every CPU.
// - float16 and bfloat16 are decoded to float32, folded there and rounded once, to nearest even, at
// the end.
//   float32 and float64 are folded in their own precision. AVG divides by n_sources before
//   rounding.
// - A NaN result is always the positive quiet NaN with an empty payload: which payload the hardware
// would keep depends
//   on operand order and CPU. MIN and MAX give NaN if any source is NaN. Of equal values (-0 and
//   +0) the first wins.
// - Integer SUM and PRODUCT wrap. AVG adds (64 bits wide, wrapping beyond) and divides, truncating
// towards zero.
// - bool: any non-zero byte is true and results are 0 or 1. SUM, MAX and BOR are "or"; PRODUCT, MIN
// and BAND are "and".
// - complex is a pair of reals: SUM, AVG and PREMUL_SUM only.
// - PREMUL_SUM rounds the factor to the precision of the fold. For integers each product is taken
// in double, truncated
//   towards zero and saturated to the type (NaN gives 0); the sum of the products wraps.
// - One source is copied as it is, NaN payloads included, except under PREMUL_SUM.
// The floating-point environment is expected to round to nearest (the default). Flushing denormals
// (torch.set_flush_denormal) changes results on the thread that has it on, so all ranks must agree
// about it.
#pragma once

#include <cstddef>
#include <string>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace horon {

bool is_reducible(DType dtype, ReduceOp op);

// Why is_reducible says no, and what to do instead: a phrase to put into an error message. Empty if
// it says yes.
std::string why_not_reducible(DType dtype, ReduceOp op);

// Folds n_sources arrays of `count` elements into dst; see Note [What the arithmetic promises].
// Requires: dst is exactly one of the sources or overlaps none of them. No alignment is needed.
// `factors` holds n_sources values for kPremulSum and is ignored otherwise. With count 0 no pointer
// is looked at. Throws UsageError unless is_reducible(dtype, op), n_sources >= 1, and factors are
// there if needed. Thread safety: may be called from any thread. Never blocks, never allocates (but
// to throw).
void reduce(void* dst, const void* const* sources, int n_sources, size_t count, DType dtype,
            ReduceOp op, const double* factors = nullptr);

// The same, and stores the results in `also` as well, in the same pass, unless that is null.
// Requires of `also` what is required of dst, and that the two are apart.
void reduce_to_both(void* dst, void* also, const void* const* sources, int n_sources, size_t count,
                    DType dtype, ReduceOp op, const double* factors = nullptr);

// The kernels in use on this CPU: "avx512", "avx2" or "baseline". For diagnostics; results do not
// depend on it.
const char* active_instruction_set();

}  // namespace horon
