// How to wait for another process: the one policy that everything within a host uses.
//
// Note [Guarded yield]
// A few pauses, then sched_yield, each one timed, for 0.3 ms at most; then sleep on a futex. With a
// core for every rank the pauses do. With more ranks than cores a yield hands the core to the rank
// that is waited for: the sooner, the better. Beside busy neighbours a yield comes back late: then
// straight to the futex, see YieldTrust; with a core for every rank after some more pauses, where
// these help, see Note [Spinning before a sleep]. Threads that compute while ours communicate are
// such neighbours. With more ranks than cores a yield may also hand nothing on: to the futex, too,
// see Note [Empty yields].
//
// Note [Spinning before a sleep]
// Where yields are not trusted (see YieldTrust) a wait would go straight to the futex, from which a
// wake-up takes some 40 us: for a large operation, which waits after every piece, twice its time.
// Whoever waits for a rank that is running had better spin for about as long. Whoever waits for one
// whose core somebody else has should not.
//
// Note [Lingering]
// Who waits for longer than that mostly waits for a rank whose computation takes some milliseconds
// more. A core that sleeps meanwhile takes 50 to 120 us to be woken, on a virtual machine. Where
// every rank has a core, a caller's thread has no better use for its own: it goes on yielding for
// some milliseconds, as long as that helps and nobody else has taken the core; once in each wait,
// and again when something has happened in it, see LingerBudget. Background threads don't.
#pragma once

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>

#include "core/deadline.h"
#include "core/wait_trust.h"
#include "shm/empty_yields.h"
#include "shm/yield_trust.h"

namespace horon {

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How often this thread was taken off its core though it could have gone on, as by its yields.
inline long times_core_lost() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

// Spins for so long without giving the core away. Returns ready()'s last value.
template <typename Ready>
bool spin_for(Clock::duration time, const Ready& ready) {
  constexpr int kPausesPerLook = 16;  // at the clock
  const Clock::time_point start = Clock::now();
  bool is_ready = ready();
  while (!is_ready && Clock::now() - start < time) {
    for (int i = 0; i < kPausesPerLook && !is_ready; ++i) {
      pause_cpu();
      is_ready = ready();
    }
  }
  return is_ready;
}

// For WaitPolicy::spin(), where it is not known who is on which core.
struct AssumeCoreNeeded {
  bool operator()() const { return true; }
};

// Thread safety: none; one per waiting thread at a time.
class WaitPolicy {
 public:
  // Crowded: more ranks than cores.
  explicit WaitPolicy(bool is_crowded)
      : is_crowded_(is_crowded), pauses_(is_crowded ? kPausesInCrowd : kPauses) {}

  // Spins and yields until `ready()` is true or it is time to sleep on a futex. Returns ready()'s
  // last value. `is_core_needed()`: whether somebody who is waited for may be on this core; asked
  // seldom.
  template <typename Ready, typename IsCoreNeeded = AssumeCoreNeeded>
  bool spin(const Ready& ready, const IsCoreNeeded& is_core_needed = {}) {
    for (int i = 0; i < pauses_; ++i) {
      if (ready()) {
        return true;
      }
      pause_cpu();
    }
    may_yield_ = trust_.begin_wait();
    if (!may_yield_) {
      return (!is_crowded_ && spin_trust_.begin_wait()) ? spin_on(ready) : ready();
    }
    const Clock::time_point start = Clock::now();
    Clock::time_point before = start;
    EmptyYields empty;
    while (true) {
      ::sched_yield();
      const bool is_ready = ready();
      const Clock::time_point now = Clock::now();
      may_yield_ = trust_.came_back_after(now - before);
      if (is_ready || !may_yield_ || now - start > kYieldTime) {
        return is_ready;
      }
      if (is_crowded_ && empty.is_look_due() && empty.look(times_core_lost()) && is_core_needed()) {
        return ready();
      }
      before = now;
    }
  }

  // After spin(), in the same wait: goes on for `time`, but not longer than `limit`, which is the
  // caller's own. Returns ready()'s last value. See Note [Lingering].
  template <typename Ready>
  bool linger(const Ready& ready, std::chrono::nanoseconds time, std::chrono::nanoseconds limit) {
    if (std::min(time, limit) <= std::chrono::nanoseconds::zero() || !may_yield_ ||
        !linger_trust_.begin_wait()) {
      return ready();
    }
    const Clock::time_point start = Clock::now();
    Clock::time_point before = start;
    bool is_ready = ready();
    while (!is_ready && may_yield_ && before - start < std::min(time, limit)) {
      ::sched_yield();
      for (int i = 0; i < kPausesPerYield && !is_ready; ++i) {
        pause_cpu();
        is_ready = ready();
      }
      const Clock::time_point now = Clock::now();
      may_yield_ = trust_.came_back_after(now - before);
      before = now;
    }
    if (is_ready || time <= limit) {  // a wait that was cut short says nothing
      linger_trust_.record(is_ready);
    }
    return is_ready;
  }

 private:
  template <typename Ready>
  bool spin_on(const Ready& ready) {
    const bool is_ready = spin_for(kSpinTime, ready);
    spin_trust_.record(is_ready);
    return is_ready;
  }

  static constexpr int kPauses = 50;
  static constexpr int kPausesInCrowd = 2;
  // While lingering: some microseconds, so that it is mostly pauses, which leave a second thread of
  // the core alone.
  static constexpr int kPausesPerYield = 200;
  // A wait that long is not about scheduling: the peer has something else to do. See linger().
  static constexpr std::chrono::microseconds kYieldTime{300};

  // What a wake-up from the futex takes.
  static constexpr std::chrono::microseconds kSpinTime{50};

  const bool is_crowded_;
  const int pauses_;
  YieldTrust trust_;
  bool may_yield_ = true;   // in this wait
  WaitTrust spin_trust_;    // see Note [Spinning before a sleep]
  WaitTrust linger_trust_;  // see Note [Lingering]
};

}  // namespace horon
