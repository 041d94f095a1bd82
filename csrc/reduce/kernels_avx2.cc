// The kernels for AVX2 and F16C.
// Compiled with -mavx2 -mf16c.
#include "reduce/kernels.inl"

#if !defined(__AVX2__) || !defined(__F16C__)
#error "kernels_avx2.cc needs its own compile options; see reduce/CMakeLists.txt"
#endif

namespace horon {

const KernelTable& avx2_kernels() {
  static constexpr KernelTable kTable = build_table("avx2");
  return kTable;
}

}  // namespace horon
