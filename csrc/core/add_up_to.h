#pragma once

#include <cstdint>

namespace horon {

// Whether the numbers are all non-negative and their sum is `total`, which any 64-bit numbers may
// claim to be: nothing overflows.
template <typename Numbers>
bool add_up_to(std::int64_t total, const Numbers& numbers) {
  std::int64_t left = total;
  for (const std::int64_t number : numbers) {
    if (number < 0 || number > left) {
      return false;
    }
    left -= number;
  }
  return left == 0;
}

}  // namespace horon
