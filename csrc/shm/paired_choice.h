// Which of two ways to do the same work is the faster one now, from how long parts of it take.
//
// Note [Pairs]
// How long a part takes depends more on where its lines are, in which cache or in memory, than on
// the way it is done, and that changes within one tensor. So the ways are compared on neighbours:
// of two parts in a row one is done each way, now and then, and which comes first takes turns. One
// pair that was interrupted does not change the choice, two that agree may. The choice changes
// nothing but the time, so ranks need not agree.
#pragma once

#include <algorithm>
#include <cstdint>

namespace horon {

// Pure but for its memory. Thread safety: none.
class PairedChoice {
 public:
  struct Turn {
    bool other = false;     // the other way than the usual one
    bool is_timed = false;  // done() wants to know how long it took
  };

  // How to do the next part.
  Turn next() const {
    if (parts_ < kPartsBetweenPairs) {
      return {.other = prefers_other_, .is_timed = false};
    }
    const bool is_second = parts_ > kPartsBetweenPairs;
    return {.other = is_second != other_comes_first_, .is_timed = true};
  }

  // A part was done as next() said, in so many nanoseconds for a byte, if it was timed.
  void done(double nanoseconds_per_byte = 0) {
    if (parts_++ < kPartsBetweenPairs) {
      return;
    }
    if (parts_ == kPartsBetweenPairs + 1) {
      first_ = nanoseconds_per_byte;
      return;
    }
    const double usual = other_comes_first_ ? nanoseconds_per_byte : first_;
    const double other = other_comes_first_ ? first_ : nanoseconds_per_byte;
    if (usual > 0 && other > 0) {
      const double ratio = std::clamp(usual / other, 1 / kMostAdvantage, kMostAdvantage);
      advantage_ += kWeight * (ratio - advantage_);
      prefers_other_ = advantage_ > (prefers_other_ ? kLeastToStay : kLeastToChange);
    }
    other_comes_first_ = !other_comes_first_;
    parts_ = 0;
  }

 private:
  static constexpr std::uint32_t kPartsBetweenPairs = 30;
  // The first parts may wait for pages.
  static constexpr std::uint32_t kPartsBeforeFirstPair = 8;
  // What a pair counts for at most, however long an interruption was.
  static constexpr double kMostAdvantage = 1.7;
  static constexpr double kWeight = 0.2;
  static constexpr double kLeastToChange = 1.15;  // two pairs that count for the most
  static constexpr double kLeastToStay = 1.05;

  std::uint32_t parts_ = kPartsBetweenPairs - kPartsBeforeFirstPair;
  double first_ = 0;      // of the pair that is under way
  double advantage_ = 1;  // how many times as long the usual way takes
  bool prefers_other_ = false;
  bool other_comes_first_ = false;
};

}  // namespace horon
