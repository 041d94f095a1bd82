// How the threads of one rank sleep until there is something to attend to, and how they are woken.
//
// Note [Who is woken]
// The bell counts what happened. The word beside it says which threads sleep and want to be woken,
// as bits of a futex: the background thread, the attendant in the foreground, or none. So a
// foreground thread that attends takes the messages without the background thread ever waking up.
// One more bit says that the rank waits for nothing of its own: then only what is urgent wakes it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/control_channel.h"
#include "core/futex.h"

namespace horon {

// A view of two words, which may be shared by several processes.
// Thread safety: all methods; attend() and leave_to_background() belong to the attendant.
class Doorbell {
 public:
  using Sleeper = ControlChannel::Sleeper;

  Doorbell(std::atomic<std::uint32_t>& count, std::atomic<std::uint32_t>& waiters)
      : count_(count), waiters_(waiters) {}

  // seq_cst here and below: either the sleeper's re-check sees the new count, or we see that it
  // sleeps. What was written before the ring is seen by who reads the count.
  std::uint32_t count() const { return count_.load(std::memory_order_seq_cst); }

  void ring(bool is_urgent) {
    count_.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t who = waiters_.load(std::memory_order_seq_cst);
    if (who != 0 && (is_urgent || (who & kOnlyUrgent) == 0)) {
      futex_wake(count_, who);
    }
  }

  void sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) {
    const bool is_foreground = sleeper == Sleeper::kForeground;
    if (is_foreground) {
      waiters_.store(kForeground, std::memory_order_seq_cst);
    }
    if (count() == seen) {
      futex_wait(count_, seen, limit, is_foreground ? kForeground : kBackground);
    }
    if (is_foreground) {
      waiters_.store(0, std::memory_order_seq_cst);
    }
  }

  void attend() { waiters_.store(0, std::memory_order_seq_cst); }

  void leave_to_background(bool only_urgent) {
    waiters_.store(kBackground | (only_urgent ? kOnlyUrgent : 0), std::memory_order_seq_cst);
  }

 private:
  static constexpr std::uint32_t kBackground = 1;
  static constexpr std::uint32_t kForeground = 2;
  static constexpr std::uint32_t kOnlyUrgent = 4;

  std::atomic<std::uint32_t>& count_;
  std::atomic<std::uint32_t>& waiters_;
};

}  // namespace horon
