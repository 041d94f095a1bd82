// Whether spinning a little longer is worth it before sleeping: a pure decision, fed with whether
// it helped.
#pragma once

#include <algorithm>
#include <cstdint>

namespace horon {

// Where yields are not trusted (see YieldTrust) a wait would go straight to the futex, from which a
// wake-up takes some 40 us: for a large operation, which waits after every piece, twice its time.
// Whoever waits for a rank that is running had better spin for about as long. Whoever waits for one
// whose core somebody else has should not: that is learnt from what became of the last waits, and
// tried again now and then.
//
// Thread safety: none.
class SpinTrust {
 public:
  static constexpr int kMost = 4;
  static constexpr std::uint32_t kWaitsBetweenTrials = 8;

  // Called when a wait would sleep; whether it should spin first.
  bool begin_wait() { return score_ > 0 || ++skipped_ % kWaitsBetweenTrials == 0; }

  // What a wait that did spin came to.
  void record(bool has_helped) { score_ = std::clamp(score_ + (has_helped ? 1 : -1), 0, kMost); }

 private:
  int score_ = kMost;
  std::uint32_t skipped_ = 0;
};

}  // namespace horon
