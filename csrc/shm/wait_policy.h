// How to wait for another process: the one policy that everything within a host uses.
//
// Note [Guarded yield]
// At most 50 pauses, then sched_yield, each one timed, for 0.3 ms at most; then sleep on a futex.
// With a core for every rank the pauses do; with more ranks than cores a yield hands the core to
// the rank that is waited for. Beside busy neighbours a yield comes back late: then straight to the
// futex for the next 256 waits, doubling up to 16,384 while that goes on.
#pragma once

#include <sched.h>

#include <cstdint>

#include "core/deadline.h"

namespace horon {

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Thread safety: none; one per waiting thread at a time.
class WaitPolicy {
 public:
  // Spins and yields until `ready()` is true or it is time to sleep on a futex. Returns ready()'s
  // last value.
  template <typename Ready>
  bool spin(const Ready& ready) {
    for (int i = 0; i < kPauses; ++i) {
      if (ready()) {
        return true;
      }
      pause_cpu();
    }
    if (futex_waits_left_ > 0) {
      --futex_waits_left_;
      return ready();
    }
    const Clock::time_point start = Clock::now();
    Clock::time_point before = start;
    while (true) {
      ::sched_yield();
      if (ready()) {
        relax(Clock::now() - before);
        return true;
      }
      const Clock::time_point now = Clock::now();
      if (now - before > kSlowYield) {
        distrust_yield();
        return false;
      }
      if (now - start > kYieldTime) {
        return false;
      }
      before = now;
    }
  }

 private:
  static constexpr int kPauses = 50;
  static constexpr std::chrono::microseconds kSlowYield{200};
  // A wait that long is not about scheduling: the peer has something else to do.
  static constexpr std::chrono::microseconds kYieldTime{300};
  static constexpr std::uint32_t kFirstPenalty = 256;
  static constexpr std::uint32_t kMaxPenalty = 16384;

  void distrust_yield() {
    futex_waits_left_ = penalty_;
    penalty_ = penalty_ * 2 > kMaxPenalty ? kMaxPenalty : penalty_ * 2;
  }

  void relax(Clock::duration last_yield) {
    if (last_yield > kSlowYield) {
      distrust_yield();
    } else {
      penalty_ = kFirstPenalty;
    }
  }

  std::uint32_t futex_waits_left_ = 0;
  std::uint32_t penalty_ = kFirstPenalty;
};

}  // namespace horon
