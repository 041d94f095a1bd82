// How much of one wait is spent lingering: see Note [Lingering] in shm/wait_policy.h.
#pragma once

#include <chrono>

#include "core/deadline.h"

namespace horon {

// A wait in which something happens may linger again, as what it waits for is under way; but not
// for ever beside traffic that is none of its business.
//
// Thread safety: none; one object for each wait.
class LingerBudget {
 public:
  static constexpr std::chrono::milliseconds kMost{50};

  // Something happened.
  void renew() { has_lingered_ = false; }

  // Calls linger(most) with what is left, if anything is and it is time; returns its result, or
  // false.
  template <typename Linger>
  bool spend(const Linger& linger) {
    if (has_lingered_ || left_.count() <= 0) {
      return false;
    }
    has_lingered_ = true;
    const Clock::time_point start = Clock::now();
    const bool result = linger(left_);
    left_ -= Clock::now() - start;
    return result;
  }

 private:
  bool has_lingered_ = false;  // since something happened
  std::chrono::nanoseconds left_ = kMost;
};

}  // namespace horon
