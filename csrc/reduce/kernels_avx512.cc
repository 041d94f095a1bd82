// The kernels for AVX-512 F, BW, DQ and VL.
// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c.
#include "reduce/kernels.inl"

#if !defined(__AVX512VL__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__F16C__)
#error "kernels_avx512.cc needs its own compile options; see reduce/CMakeLists.txt"
#endif

namespace horon {

const KernelTable& avx512_kernels() {
  static constexpr KernelTable kTable = build_table("avx512");
  return kTable;
}

}  // namespace horon
