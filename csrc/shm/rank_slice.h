// Which part of a tensor, or of a piece of one, each rank reduces. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shm/segment.h"

namespace horon {

// Elements [begin, end).
struct Slice {
  std::uint64_t begin;
  std::uint64_t end;
};

// Splits `count` elements over the ranks on cache-line boundaries, as equally as can be.
inline Slice slice_of(std::uint64_t count, std::size_t element_bytes, int rank, int n_ranks) {
  const std::uint64_t line = kCacheLineBytes / element_bytes;
  const auto n = static_cast<std::uint64_t>(n_ranks);
  const auto r = static_cast<std::uint64_t>(rank);
  const std::uint64_t per_rank = ((count + n - 1) / n + line - 1) / line * line;
  return {std::min(count, r * per_rank), std::min(count, (r + 1) * per_rank)};
}

}  // namespace horon
