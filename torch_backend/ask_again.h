// Waiting for keys at a c10d store, from which other threads of the process go on getting theirs.
//
// Note [Waiting at a store]
// A process has one connection to its TCPStore. wait() holds it until the key is there or the time
// is up, and meanwhile no other thread of the process gets anything from or into the store: two
// threads that make groups could wait for each other's keys on both ranks. It also prints two
// warnings whenever its time is up. So the store is asked again and again instead, at first at once
// and then less and less often; there is nothing that would wake us.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/deadline.h"

namespace horon::torch_backend {

inline constexpr std::chrono::milliseconds kStoreLookAround{1000};

// Asks until `is_there()`; false once the deadline has passed. `look_around()` is called about
// every second, and throws to give up.
template <typename IsThere, typename LookAround>
bool ask_again(const IsThere& is_there, const LookAround& look_around, const Deadline& deadline) {
  constexpr Clock::duration kFirstPause = std::chrono::microseconds(100);
  constexpr Clock::duration kLongestPause = std::chrono::milliseconds(250);
  const auto began = Clock::now();
  auto looked = began;
  while (!is_there()) {
    const auto now = Clock::now();
    if (deadline.has_passed()) {
      return false;
    }
    if (now - looked >= kStoreLookAround) {
      look_around();
      looked = now;
    }
    const Clock::duration left = deadline.remaining();
    const auto pause = std::clamp((now - began) / 4, kFirstPause, kLongestPause);
    std::this_thread::sleep_for(std::min(pause, left));
  }
  return true;
}

}  // namespace horon::torch_backend
