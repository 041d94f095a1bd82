// Waiting for something that other processes announce by changing a futex word.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/futex.h"
#include "core/wait_context.h"
#include "shm/wait_policy.h"

namespace horon {

// How long to sleep before looking whether the peer is still alive and somebody wants us back.
inline constexpr std::chrono::milliseconds kLookAround{50};

// Sleeps until `word` is changed, for at most `limit`; not at all if `ready()` by then. A Word is a
// CounterWord or has members of the same names.
template <typename Word, typename Ready>
void sleep_on(Word& word, const Ready& ready, std::chrono::nanoseconds limit) {
  word.waiters.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = word.value.load(std::memory_order_seq_cst);
  if (!ready()) {
    futex_wait(word.value, seen, limit);
  }
  word.waiters.fetch_sub(1, std::memory_order_relaxed);
}

// Waits until `ready()`, as the policy says. Whoever makes it true changes `word` and calls
// wake_sleepers(). Before each sleep `check()` runs, which throws to give up; so does what
// context.check_interrupt throws. The deadline only bounds the sleeps: check() looks at it.
// `is_over()`: stop spinning, because check() will throw. `is_core_needed`: see WaitPolicy::spin();
// `linger_time`: Peers::linger_time.
template <typename Word, typename Ready, typename IsOver, typename Check, typename IsCoreNeeded>
void wait_for_word(Word& word, WaitPolicy& policy, const Ready& ready, const IsOver& is_over,
                   const Check& check, const WaitContext& context,
                   const IsCoreNeeded& is_core_needed, std::chrono::microseconds linger_time) {
  if (ready()) {
    return;
  }
  const auto is_ended = [&] { return ready() || is_over(); };
  if (!policy.spin(is_ended, is_core_needed) && context.may_linger) {
    policy.linger(is_ended, linger_time, context.deadline.remaining());
  }
  Clock::time_point next_interrupt_check{};
  while (!ready()) {
    check();
    const auto left = std::max<std::chrono::nanoseconds>(context.deadline.remaining(),
                                                         std::chrono::microseconds(1));
    sleep_on(word, ready, std::min<std::chrono::nanoseconds>(kLookAround, left));
    const Clock::time_point now = Clock::now();
    if (next_interrupt_check == Clock::time_point{}) {
      next_interrupt_check = now + kLookAround;
    } else if (context.check_interrupt != nullptr && now >= next_interrupt_check) {
      (*context.check_interrupt)();
      next_interrupt_check = Clock::now() + kLookAround;
    }
  }
}

// After `word` was changed. The change must be seq_cst, or a seq_cst fence lie between: either the
// sleeper's second look sees it, or we see that it sleeps.
template <typename Word>
void wake_sleepers(Word& word) {
  if (word.waiters.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(word.value);
  }
}

}  // namespace horon
