// A point in time that a wait must not pass, remembered with the timeout it came from.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace horon {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  // `timeout` from now. Negative timeouts count as zero; very long ones are capped at a year, which
  // keeps the arithmetic in range.
  static Deadline after(std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    const milliseconds bounded =
        std::clamp(timeout, milliseconds(0), milliseconds(std::int64_t{365} * 24 * 3600 * 1000));
    return {Clock::now() + bounded, bounded};
  }

  // So much later, for who waits for somebody that has this one.
  Deadline later(std::chrono::milliseconds by) const { return {at_ + by, timeout_}; }

  bool has_passed() const { return Clock::now() >= at_; }
  std::chrono::nanoseconds remaining() const { return at_ - Clock::now(); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  Clock::time_point at() const { return at_; }

 private:
  Deadline(Clock::time_point at, std::chrono::milliseconds timeout) : at_(at), timeout_(timeout) {}

  Clock::time_point at_;
  std::chrono::milliseconds timeout_;
};

}  // namespace horon
