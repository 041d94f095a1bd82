// How much more than the others a rank takes of a reduction, since it is ahead of them.
//
// Note [Leads]
// Of ranks that compute the same, one may always be slower: its core has a neighbour, say. The
// others wait for it, at the next meeting or for the results, and could have done its part of the
// last reduction instead. So after each reduction of a meeting a rank looks how long it waits next,
// and takes a little more of that reduction the next time. What all ranks have come to want is in
// the headers, and only differences count. The last reduction before the results are wanted is
// followed by a wait for itself: there, who took less waits for who took more, and that is undone.
//
// Which rank reduces what changes no bit of the result.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace horon {

// Pure but for its memory. Thread safety: none. Operations are known by an address, which may be
// anything that stays the same from step to step.
class Leads {
 public:
  std::uint32_t of(const void* operation) const {
    const auto known = find(operation);
    return known == known_.end() ? 0 : static_cast<std::uint32_t>(known->bytes);
  }

  // The operation, of so many bytes, has been carried out at a meeting, with leads of which every
  // rank's was at least `common`. That is taken off: since leads have a limit, ranks that all wait
  // now and then would reach it, and differ no more.
  void ran(const void* operation, std::uint64_t bytes, std::uint32_t common) {
    last_ = operation;
    last_bytes_ = static_cast<double>(std::min(bytes, kMostBytes));
    const auto known = find(operation);
    if (known != known_.end()) {
      known->bytes = std::max(known->bytes - common, 0.0);
    }
  }

  // Whether the next wait is of interest.
  bool is_looking() const { return last_ != nullptr; }
  // After what ran last, this rank has waited for the others for so long.
  void waited(std::chrono::nanoseconds time) {
    auto known = find(last_);
    if (known == known_.end()) {
      if (known_.size() == kMostKnown) {
        known_.clear();  // they do not come again, it seems
      }
      known = known_.insert(known_.end(), {last_, 0});
    }
    const auto late = std::clamp(time - kNoWait, std::chrono::nanoseconds(0), kMostWait);
    const double more = kGain * kBytesPerNanosecond * static_cast<double>(late.count());
    known->bytes = std::min((1 - kLeak) * known->bytes + more, last_bytes_);
    last_ = nullptr;
  }

 private:
  struct Known {
    const void* operation;
    double bytes;
  };
  // What agreeing takes if nobody is late.
  static constexpr std::chrono::nanoseconds kNoWait{50'000};
  // A long wait may be for anything, an evaluation on one rank, say.
  static constexpr std::chrono::nanoseconds kMostWait{1'000'000};
  // What a core reduces. It only makes the gain larger or smaller, so it need not be right.
  static constexpr double kBytesPerNanosecond = 10;
  static constexpr double kGain = 0.3;
  static constexpr double kLeak = 0.05;
  static constexpr std::size_t kMostKnown = 64;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 31;

  std::vector<Known>::iterator find(const void* operation) {
    return std::ranges::find(known_, operation, &Known::operation);
  }
  std::vector<Known>::const_iterator find(const void* operation) const {
    return std::ranges::find(known_, operation, &Known::operation);
  }

  std::vector<Known> known_;
  const void* last_ = nullptr;
  double last_bytes_ = 0;
};

}  // namespace horon
