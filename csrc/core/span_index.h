// Where tensors of one call share memory.
//
// A transport may write an output while other outputs are still waiting for what inputs bring. Most
// calls' tensors are apart; this finds the ones that are not.
#pragma once

#include <algorithm>
#include <cstddef>

#include "core/request.h"

namespace horon {

// Thread safety: none. Spans keep the number in which they were given.
class SpanIndex {
 public:
  // Of anything that holds spans. Sorts them: k log k.
  template <typename Spans>
  explicit SpanIndex(const Spans& spans) {
    std::size_t number = 0;
    for (const auto& span : spans) {
      if (span.bytes > 0) {
        entries_.push_back({span.data, span.data + span.bytes, nullptr, number});
      }
      ++number;
    }
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
    const std::byte* reach = nullptr;
    for (Entry& entry : entries_) {
      reach = std::max(reach, entry.end);
      entry.reach = reach;
    }
  }

  // Whether matters(number) is true for one of the spans that share bytes with `span`.
  template <typename Matters>
  bool any_overlap(const ConstSpan& span, const Matters& matters) const {
    if (span.bytes == 0) {
      return false;
    }
    const Entry* entry = std::lower_bound(
        entries_.begin(), entries_.end(), span.data + span.bytes,
        [](const Entry& candidate, const std::byte* end) { return candidate.begin < end; });
    while (entry != entries_.begin()) {
      --entry;
      if (entry->reach <= span.data) {
        return false;  // neither this one nor any before it gets that far
      }
      if (entry->end > span.data && matters(entry->number)) {
        return true;
      }
    }
    return false;
  }

 private:
  struct Entry {
    const std::byte* begin;
    const std::byte* end;
    const std::byte* reach;  // the furthest end, from the first entry to this one
    std::size_t number;
  };

  PerRank<Entry> entries_;  // by begin
};

}  // namespace horon
