// Whether waiting a little is worth it: a pure decision, fed with what became of the last waits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace horon {

// A short wait spares something dearer (a wake-up from a futex, a second look at what the caches
// held) if whoever is waited for comes soon, as the last times; if not, it is time lost. That is
// learnt, and tried again now and then.
//
// Thread safety: none.
class WaitTrust {
 public:
  static constexpr int kMost = 4;
  static constexpr std::uint32_t kWaitsBetweenTrials = 8;

  // Called when there is something to wait for; whether to do it.
  bool begin_wait() { return score_ > 0 || begin_wait(++n_skipped_); }
  // The same where waits have numbers, so that all who wait for each other try again at once.
  bool begin_wait(std::uint32_t number) const {
    return score_ > 0 || number % kWaitsBetweenTrials == 0;
  }

  // What a wait that did happen came to.
  void record(bool has_helped) { score_ = std::clamp(score_ + (has_helped ? 1 : -1), 0, kMost); }

 private:
  int score_ = kMost;
  std::uint32_t n_skipped_ = 0;
};

}  // namespace horon
