// In which order large tensors are worked on. Pure.
//
// Note [From the end]
// A tensor that has just been written, from its beginning to its end, is found in the caches from
// the end on, if it is larger than they are: going the same way again would push out each part just
// before its turn. So large tensors are worked on from the end, a stretch at a time; within one the
// hardware looks ahead. What is not in the caches takes the same time either way.
#pragma once

#include <cstdint>

namespace horon {

// Whether all ranks' tensors of so many bytes together are too large for the caches of most CPUs.
inline bool goes_from_the_end(std::uint64_t bytes, int n_ranks) {
  constexpr std::uint64_t kLargerThanCaches = std::uint64_t{24} << 20;
  return bytes * static_cast<std::uint64_t>(n_ranks) > kLargerThanCaches;
}

// What has the i-th turn of n pieces: from the end in stretches, forward within one.
inline std::uint64_t from_the_end(std::uint64_t i, std::uint64_t n, std::uint64_t stretch) {
  const std::uint64_t odd = n % stretch;  // pieces in the last stretch, which may be shorter
  if (i < odd) {
    return n - odd + i;
  }
  const std::uint64_t left = n - odd - (i - odd) / stretch * stretch;  // before this stretch's end
  return left - stretch + (i - odd) % stretch;
}

}  // namespace horon
