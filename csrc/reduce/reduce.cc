#include "reduce/reduce.h"

#include <cstring>

#include "core/error.h"
#include "reduce/kernel_table.h"

namespace horon {
namespace {

bool is_known(DType dtype, ReduceOp op) {
  return static_cast<int>(dtype) < kDTypeCount && static_cast<int>(op) < kReduceOpCount;
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
}

// Which of reduce()'s requirements does not hold. Apart, so that the way that is taken stays short.
[[noreturn]] void throw_invalid(int n_sources, DType dtype, ReduceOp op) {
  if (!is_reducible(dtype, op)) throw UsageError("reduce: " + why_not_reducible(dtype, op));
  if (n_sources < 1) {
    throw UsageError("reduce: expected at least one source, got " + std::to_string(n_sources));
  }
  throw UsageError("reduce: PREMUL_SUM needs one factor per source, got none");
}

}  // namespace

// The table is the one list of what can be reduced; the baseline's stands for all, they are made
// from one source.
bool is_reducible(DType dtype, ReduceOp op) {
  return is_known(dtype, op) &&
         baseline_kernels().entries[static_cast<int>(dtype)][static_cast<int>(op)].kernel !=
             nullptr;
}

std::string why_not_reducible(DType dtype, ReduceOp op) {
  if (is_reducible(dtype, op)) return "";
  const std::string what = std::string(name(op)) + " of " + name(dtype);
  if (!is_known(dtype, op))
    return what + " is not known to this build; run the same version of horon on all ranks";
  if (dtype == DType::kOpaque) {
    return std::string(name(op)) +
           " of elements like float8 or quantized ones is not defined: they can be moved but not "
           "reduced; cast to a type like float32 first";
  }
  if (is_complex(dtype)) {
    return what +
           " is not defined: complex numbers support SUM, AVG and PREMUL_SUM; for an operation on "
           "each part, "
           "pass torch.view_as_real(tensor)";
  }
  if (dtype == DType::kBool)
    return what + " is not defined; cast to float32 (or an integer type) first";
  if (is_bitwise(op)) {
    return what +
           " is not defined: bitwise operations take integers and bool; pass tensor.view(an "
           "integer dtype) "
           "to work on the bits";
  }
  return what + " is not supported";
}

void reduce_with(const KernelTable& kernels, void* dst, void* also, const void* const* sources,
                 int n_sources, size_t count, DType dtype, ReduceOp op, const double* factors) {
  if (!is_known(dtype, op)) throw_invalid(n_sources, dtype, op);
  const KernelEntry& entry = kernels.entries[static_cast<int>(dtype)][static_cast<int>(op)];
  const bool scales = op == ReduceOp::kPremulSum;
  if (entry.kernel == nullptr || n_sources < 1 || (scales && factors == nullptr))
    throw_invalid(n_sources, dtype, op);
  if (count == 0) return;
  // A bool still goes through its kernel, which turns any true byte into 1.
  if (n_sources == 1 && !scales && dtype != DType::kBool) {
    for (void* target : {dst, also}) {
      if (target != nullptr && target != sources[0]) {
        std::memcpy(target, sources[0], count * element_bytes(dtype));
      }
    }
    return;
  }
  entry.kernel(dst, also, sources, n_sources, count * entry.units_per_element, factors);
}

void reduce(void* dst, const void* const* sources, int n_sources, size_t count, DType dtype,
            ReduceOp op, const double* factors) {
  reduce_to_both(dst, nullptr, sources, n_sources, count, dtype, op, factors);
}

void reduce_to_both(void* dst, void* also, const void* const* sources, int n_sources, size_t count,
                    DType dtype, ReduceOp op, const double* factors) {
  reduce_with(active_kernels(), dst, also, sources, n_sources, count, dtype, op, factors);
}

const char* active_instruction_set() { return active_kernels().name; }

}  // namespace horon
