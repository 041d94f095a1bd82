// Whether handing the core on is worth it: a pure decision, fed with how long yields took.
#pragma once

#include <chrono>
#include <cstdint>

namespace horon {

// Beside busy neighbours a yield comes back late, when they have used up their time slice (over a
// millisecond): then waits had better go straight to the futex, from which a wake-up is sooner.
// That is tried for a few waits, and twice as many whenever yields turn out to be slow again, so
// that a short disturbance (everybody starts up, somebody collects garbage) costs little and
// lasting neighbours are asked seldom. A number of waits without a slow yield restores the trust.
//
// Thread safety: none.
class YieldTrust {
 public:
  // Above: the core was with somebody who does not take part. Below: a few ranks took their turn,
  // which with Python's work between two operations and four ranks on a core is half a millisecond.
  static constexpr std::chrono::microseconds kSlowYield{1000};
  static constexpr std::uint32_t kFirstPenalty = 16;  // in waits
  static constexpr std::uint32_t kMostPenalty = 16384;
  static constexpr std::uint32_t kForgivenAfter = 64;  // waits

  // Called when a wait may begin to yield; false if it should not.
  bool begin_wait() {
    if (futex_waits_left_ > 0) {
      --futex_waits_left_;
      return false;
    }
    if (++good_waits_ > kForgivenAfter) {
      penalty_ = kFirstPenalty;
    }
    return true;
  }

  // After each yield; false if this wait should yield no more.
  bool came_back_after(std::chrono::nanoseconds took) {
    if (took <= kSlowYield) {
      return true;
    }
    good_waits_ = 0;
    futex_waits_left_ = penalty_;
    penalty_ = penalty_ < kMostPenalty / 2 ? 2 * penalty_ : kMostPenalty;
    return false;
  }

 private:
  std::uint32_t futex_waits_left_ = 0;
  std::uint32_t penalty_ = kFirstPenalty;
  std::uint32_t good_waits_ = 0;  // since the last slow yield, this one included
};

}  // namespace horon
