#pragma once

#include <cstdint>

namespace horon {

// What the numbers leave of `total`; less than 0 if one of them is negative or they are more than
// that, which any 64-bit numbers may be: nothing overflows.
template <typename Numbers>
std::int64_t left_of(std::int64_t total, const Numbers& numbers) {
  std::int64_t left = total;
  for (const std::int64_t number : numbers) {
    if (number < 0 || number > left) {
      return -1;
    }
    left -= number;
  }
  return left;
}

// Whether the numbers are all non-negative and their sum is `total`.
template <typename Numbers>
bool add_up_to(std::int64_t total, const Numbers& numbers) {
  return left_of(total, numbers) == 0;
}

// The same of a sum that is at most `total`.
template <typename Numbers>
bool fit_into(std::int64_t total, const Numbers& numbers) {
  return left_of(total, numbers) >= 0;
}

}  // namespace horon
