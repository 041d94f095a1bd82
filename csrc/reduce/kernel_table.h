// Internal to reduce/ and its tests: the kernels of one instruction set, and which sets this CPU
// can run.
//
// Note [One source, several instruction sets]
// kernels.inl is compiled once per instruction set, each time with other -m flags. Everything in it
// has internal linkage, and it uses no inline function of the standard library: the linker keeps
// one copy of such a function for the whole program, and that copy might be the one with AVX-512 in
// it, on a CPU without. The same goes for this header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace horon {

// Requires n_sources >= 1, unit_count >= 1 and factors for kPremulSum; otherwise as
// reduce_to_both().
using ReduceKernel = void (*)(void* dst, void* also, const void* const* sources, int n_sources,
                              size_t unit_count, const double* factors);

struct KernelEntry {
  ReduceKernel kernel;        // Null: not reducible.
  uint8_t units_per_element;  // What the kernel counts: a complex number is two reals, bitwise
                              // operations count bytes.
};

struct KernelTable {
  const char* name;
  KernelEntry entries[kDTypeCount][kReduceOpCount];
};

enum class InstructionSet : uint8_t { kBaseline, kAvx2, kAvx512 };

inline constexpr InstructionSet kAllInstructionSets[] = {
    InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512};

// Null if this build or this CPU lacks the instruction set. kBaseline is always there.
const KernelTable* kernels_for(InstructionSet set);

// The best that this CPU has; decided at the first call.
const KernelTable& active_kernels();

// reduce_to_both() with the kernels of the caller's choice.
void reduce_with(const KernelTable& kernels, void* dst, void* also, const void* const* sources,
                 int n_sources, size_t count, DType dtype, ReduceOp op, const double* factors);

const KernelTable& baseline_kernels();
const KernelTable& avx2_kernels();    // x86-64 only; requires AVX2 and F16C.
const KernelTable& avx512_kernels();  // x86-64 only; requires AVX-512 F, BW, DQ, VL, and F16C.

}  // namespace horon
