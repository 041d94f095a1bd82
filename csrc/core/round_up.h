// The next multiple of a size.
#pragma once

namespace horon {

// Pure. The least multiple of `unit` that is at least `value`; both in the same unit, no overflow.
template <class Integer>
constexpr Integer round_up(Integer value, Integer unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace horon
