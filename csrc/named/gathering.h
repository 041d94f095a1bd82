// How long the background thread leaves a burst of submissions alone, so that it travels in few
// messages and batches. Whoever waits does not wait for that. Pure.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace horon {

struct GatherLimits {
  std::chrono::microseconds time;
  std::uint64_t bytes;  // that are worth a start at once
  bool is_on_device;
};

inline constexpr GatherLimits kGather{std::chrono::microseconds(150), std::uint64_t{1} << 20,
                                      false};

// CPU tensors when no core is to spare. What is begun early then gains nothing, since it takes the
// time of whoever submits; and of names that come in another order on each rank, few are agreed on
// early.
inline constexpr GatherLimits kGatherInTurn{std::chrono::milliseconds(1), std::uint64_t{8} << 20,
                                            false};

// Tensors on a GPU: a call there costs more than the host sees of it, and a GPU that computes
// gradients does so meanwhile. Horovod's cycle, and what a bucket of DDP holds.
inline constexpr GatherLimits kGatherOnDevice{std::chrono::milliseconds(1), std::uint64_t{25} << 20,
                                              true};

// A device that has a batch behind the one that it carries out would only queue a third. So what
// comes meanwhile goes on being gathered, with a look at the device now and then.
inline constexpr std::size_t kBatchesToWaitFor = 2;
inline constexpr std::chrono::microseconds kLookAtDeviceEvery{250};
inline constexpr std::chrono::milliseconds kLongestOnDevice{50};

class Gathering {
 public:
  using Clock = std::chrono::steady_clock;

  // For the first submission after a start.
  void begin(const GatherLimits& limits, Clock::time_point now) {
    bytes_ = 0;
    is_on_device_ = true;
    until_ = now + limits.time;
    latest_ = now + kLongestOnDevice;
  }

  // Returns whether there is enough now, and was not before.
  bool add(const GatherLimits& limits, std::uint64_t bytes) {
    const bool had_enough = bytes_ >= limits.bytes;
    bytes_ += bytes;
    is_on_device_ = is_on_device_ && limits.is_on_device;
    const bool has_enough = bytes_ >= limits.bytes;
    if (has_enough) {
      until_ = {};
    }
    return has_enough && !had_enough;
  }

  std::chrono::nanoseconds left(Clock::time_point now) const { return until_ - now; }

  // Whether what has been gathered long enough goes on if the device has kBatchesToWaitFor.
  // (Not where enough has come.)
  bool may_wait_for_device(Clock::time_point now) const {
    return is_on_device_ && until_ != Clock::time_point{} && until_ <= now && now < latest_;
  }
  void wait_for_device(Clock::time_point now) { until_ = now + kLookAtDeviceEvery; }

 private:
  std::uint64_t bytes_ = 0;
  bool is_on_device_ = false;
  Clock::time_point until_;  // the epoch: enough has come
  Clock::time_point latest_;
};

}  // namespace horon
