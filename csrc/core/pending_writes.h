// The memory that started operations will write when they are completed.
//
// An operation that reads what an earlier one writes must not be started before that one is
// completed: it would bring the old contents.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>

#include "core/request.h"

namespace horon {

// Thread safety: none. First in, first out, as the operations are.
class PendingWrites {
 public:
  void push(const Request& request) { writes_.push_back(hull(request.outputs)); }
  void pop() { writes_.pop_front(); }

  // True where there may be an overlap; outputs in several places count as one long one.
  bool overlaps_inputs(const Request& request) const {
    for (const ConstSpan& input : request.inputs) {
      for (const Range& write : writes_) {
        if (input.bytes > 0 && input.data < write.end && write.begin < input.data + input.bytes) {
          return true;
        }
      }
    }
    return false;
  }

 private:
  struct Range {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
  };

  static Range hull(const PerRank<Span>& outputs) {
    Range range;
    for (const Span& output : outputs) {
      if (output.bytes > 0) {
        const bool is_first = range.begin == nullptr;
        range.begin = is_first ? output.data : std::min<const std::byte*>(range.begin, output.data);
        range.end = is_first ? output.data + output.bytes
                             : std::max<const std::byte*>(range.end, output.data + output.bytes);
      }
    }
    return range;
  }

  std::deque<Range> writes_;
};

}  // namespace horon
