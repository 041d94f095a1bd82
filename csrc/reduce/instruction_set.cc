// Chooses kernels for the CPU that the program runs on.
#include "reduce/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace horon {

#if defined(__x86_64__)
namespace {

// Asked of the CPU itself: older clang versions do not know "f16c" in __builtin_cpu_supports. That
// the operating system saves the registers follows from "avx2", which is checked together with it.
bool cpu_has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool cpu_has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && cpu_has_f16c();
}

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace

const KernelTable* kernels_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBaseline:
      return &baseline_kernels();
    case InstructionSet::kAvx2:
      return cpu_has_avx2() ? &avx2_kernels() : nullptr;
    case InstructionSet::kAvx512:
      return cpu_has_avx512() ? &avx512_kernels() : nullptr;
  }
  return nullptr;
}

#else

const KernelTable* kernels_for(InstructionSet set) {
  return set == InstructionSet::kBaseline ? &baseline_kernels() : nullptr;
}

#endif

const KernelTable& active_kernels() {
  static const KernelTable& best = []() -> const KernelTable& {
    if (const KernelTable* kernels = kernels_for(InstructionSet::kAvx512)) return *kernels;
    if (const KernelTable* kernels = kernels_for(InstructionSet::kAvx2)) return *kernels;
    return baseline_kernels();
  }();
  return best;
}

}  // namespace horon
