// Which part of a tensor, or of a piece of one, each rank reduces. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/request.h"
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

// The same, unless ranks lead: then each takes so many bytes more, as far as there is work.
// Requires one lead for each rank, the same on all ranks.
inline Slice slice_by_lead(std::uint64_t count, std::size_t element_bytes, int rank,
                           const PerRank<std::uint32_t>& leads) {
  const auto n_ranks = static_cast<int>(leads.size());
  const double all = static_cast<double>(count) * static_cast<double>(element_bytes);
  // What everybody takes besides its lead, less than nothing if need be; but nobody takes less than
  // nothing altogether.
  double level = 0;
  PerRank<bool> is_out;
  is_out.resize(leads.size(), false);
  for (bool is_settled = false; !is_settled;) {
    double led = 0;
    int n = 0;
    for (std::size_t i = 0; i < leads.size(); ++i) {
      led += is_out[i] ? 0 : static_cast<double>(leads[i]);
      n += is_out[i] ? 0 : 1;
    }
    level = (all - led) / n;
    is_settled = true;
    for (std::size_t i = 0; i < leads.size(); ++i) {
      if (!is_out[i] && level + static_cast<double>(leads[i]) < 0) {
        is_out[i] = true;
        is_settled = false;
      }
    }
  }
  const std::uint64_t line = kCacheLineBytes / element_bytes;
  double bytes = 0;
  Slice slice{0, 0};
  for (int i = 0; i <= rank; ++i) {
    const auto index = static_cast<std::size_t>(i);
    bytes += is_out[index] ? 0 : level + static_cast<double>(leads[index]);
    slice.begin = slice.end;
    const auto elements = static_cast<std::uint64_t>(bytes / static_cast<double>(element_bytes));
    slice.end = i == n_ranks - 1 ? count : std::min(count, elements / line * line);
  }
  return slice;
}

}  // namespace horon
