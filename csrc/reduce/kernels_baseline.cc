// The kernels for that every CPU of the architecture has (x86-64: SSE2; arm64: NEON).
#include "reduce/kernels.inl"

namespace horon {

const KernelTable& baseline_kernels() {
  static constexpr KernelTable kTable = build_table("baseline");
  return kTable;
}

}  // namespace horon
