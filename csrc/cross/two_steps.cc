#include "cross/two_steps.h"

#include <cstring>

#include "reduce/convert_halves.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

template <typename Real>
void divide(void* values, std::size_t count, int divisor) {
  auto* const bytes = static_cast<std::byte*>(values);
  const auto by = static_cast<Real>(divisor);
  for (std::size_t i = 0; i < count; ++i) {
    Real value;
    std::memcpy(&value, bytes + i * sizeof value, sizeof value);
    value /= by;
    std::memcpy(bytes + i * sizeof value, &value, sizeof value);
  }
}

void divide(DType dtype, void* values, std::size_t count, int divisor) {
  const std::size_t parts = is_complex(dtype) ? 2 : 1;
  if (dtype == DType::kFloat32 || dtype == DType::kComplex64) {
    divide<float>(values, count * parts, divisor);
  } else {
    divide<double>(values, count * parts, divisor);
  }
}

}  // namespace

std::optional<TwoSteps> two_steps(DType dtype, ReduceOp op, int n_ranks) {
  if (op == ReduceOp::kAvg && is_integer(dtype)) {
    return std::nullopt;
  }
  TwoSteps steps;
  steps.result = dtype;
  steps.between = is_half(dtype) ? DType::kFloat32 : dtype;
  steps.first = op;
  steps.second = op;
  if (op == ReduceOp::kAvg) {
    steps.first = ReduceOp::kSum;
    steps.second = ReduceOp::kSum;
    steps.divisor = n_ranks;
  } else if (op == ReduceOp::kPremulSum) {
    steps.second = ReduceOp::kSum;
  }
  return steps;
}

void take_second_step(const TwoSteps& steps, void* result, void* scratch,
                      const void* const* sources, int n_sources, std::size_t count) {
  void* const reduced = steps.widens() ? scratch : result;
  reduce(reduced, sources, n_sources, count, steps.between, steps.second);
  if (steps.divisor > 1) {
    divide(steps.between, reduced, count, steps.divisor);
  }
  if (steps.widens()) {
    round_to_halves(steps.result, reduced, result, count);
  }
}

}  // namespace horon
