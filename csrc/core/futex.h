// Waiting on, and waking, a 32-bit word that several processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace horon {

// Sleeps while `word` is `expected`, for at most `limit`. Returns early on a wake, a signal, or for
// no reason; the caller looks again. Shared (not PRIVATE): the word is mapped by several processes.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds limit) {
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec relative{};
  relative.tv_sec = static_cast<time_t>(seconds.count());
  relative.tv_nsec = static_cast<long>((limit - seconds).count());
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

// The same for sleepers of several kinds: each waits for wakes that have one of its `bits`.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds limit, std::uint32_t bits) {
  // FUTEX_WAIT_BITSET takes a point in time, of CLOCK_MONOTONIC.
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  constexpr long kSecond = 1000000000;
  until.tv_sec += static_cast<time_t>(seconds.count());
  until.tv_nsec += static_cast<long>((limit - seconds).count());
  if (until.tv_nsec >= kSecond) {
    until.tv_nsec -= kSecond;
    ++until.tv_sec;
  }
  ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &until, nullptr, bits);
}

// Wakes all sleepers that wait for one of the bits; those that gave none, too.
inline void futex_wake(const std::atomic<std::uint32_t>& word, std::uint32_t bits) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
}

inline void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace horon
