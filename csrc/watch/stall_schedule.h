// When a wait that lasts is worth a word. Pure.
#pragma once

#include <algorithm>
#include <chrono>

#include "core/deadline.h"

namespace horon {

// So long before its time is up, a wait is reported once more: the error that follows only says who
// was late.
inline constexpr std::chrono::seconds kReportBeforeTheEnd{2};

// After `interval`, after twice as much, four times, and so on, and once before time is up.
class StallSchedule {
 public:
  // An interval of 0: never.
  explicit StallSchedule(std::chrono::milliseconds interval) : interval_(interval) {}

  // Whether a report is due after a wait of `waited` that has so much time left. Due once each.
  bool is_due(Clock::duration waited, Clock::duration left) {
    if (interval_.count() <= 0) {
      return false;
    }
    const bool is_long = waited >= interval_ * factor_;
    // Of a wait that has just begun there is nothing to tell.
    const bool is_last =
        !said_last_ && left <= kReportBeforeTheEnd && waited >= kReportBeforeTheEnd;
    while (waited >= interval_ * factor_) {
      factor_ *= 2;
    }
    said_last_ = said_last_ || is_last || (is_long && left <= kReportBeforeTheEnd);
    return is_long || is_last;
  }

 private:
  std::chrono::milliseconds interval_;
  std::int64_t factor_ = 1;
  bool said_last_ = false;
};

// Whether this rank is to report that a group waits for the `missing`: the first of those that
// have come.
template <typename Ranks>
bool is_first_to_come(int rank, const Ranks& missing) {
  for (int other = 0; other < rank; ++other) {
    if (std::find(missing.begin(), missing.end(), other) == missing.end()) {
      return false;
    }
  }
  return true;
}

}  // namespace horon
