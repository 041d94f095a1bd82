#include "core/allocation_habit.h"

#include <algorithm>

namespace horon {

void AllocationHabit::see(int run, AllocationNumber number, const void* address) {
  if (run_ != run) {
    run_ = run;
    seen_.clear();
  }
  seen_.emplace_back(address, number);
}

void AllocationHabit::learn(int run, const void* result) {
  if (!has_seen(run)) {
    return;
  }
  // The last one: what was allocated before it may have been there and gone.
  const auto found = std::find_if(seen_.rbegin(), seen_.rend(),
                                  [result](const auto& seen) { return seen.first == result; });
  if (found != seen_.rend()) {
    number_ = found->second;
  } else {
    miss();
  }
  seen_.clear();
}

void AllocationHabit::miss() {
  number_.reset();
  ++n_misses_;
}

int AllocationCounter::next(int run, const void* node, std::size_t bytes) {
  if (run != run_ || node != node_) {
    run_ = run;
    node_ = node;
    counts_.clear();
  }
  const auto found = std::find_if(counts_.begin(), counts_.end(),
                                  [bytes](const auto& count) { return count.first == bytes; });
  if (found != counts_.end()) {
    return ++found->second;
  }
  counts_.emplace_back(bytes, 0);
  return 0;
}

}  // namespace horon
