// Whether a tensor is made and reduced a part at a time, or made first.
//
// Note [Trials]
// What is faster depends on the library that multiplies the matrices, on their sizes and on the
// caches, and is not known beforehand. So of each operation's first times, and again of some after
// a thousand, one is done each way by turns; after that all ranks tell each other how long each way
// took them, in the median, and do what took them less together. They tell it in an exchange that
// comes before every reduction that could be either, so that all know the same and decide alike; if
// they do not, because one has forgotten, both ways go together, only slower. (DDP has an order of
// its own, and exchanges when a trial ends: Note [DDP's gradients in parts].)
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace horon {

// Of one operation. Pure but for its memory. Thread safety: none.
class PartsTrial {
 public:
  // What ranks tell each other.
  struct Told {
    std::int64_t times = 0;     // how often it has been done
    std::int64_t whole_ns = 0;  // 0: not known
    std::int64_t parts_ns = 0;
  };

  // How to do it the next time.
  bool wants_parts() const { return is_trying() ? times_ % 2 == 1 : prefers_parts_; }

  // Whether it is the last of those that are tried: what the ranks tell each other after it counts
  // until the next trial.
  bool is_last_try() const {
    return times_ % kPeriod == 2 * static_cast<std::int64_t>(kTrialsEach) - 1;
  }

  // It was done, by this rank in so long, from when it began to make it.
  void took(bool in_parts, std::chrono::nanoseconds time) {
    if (is_trying()) {
      Times& times = in_parts ? parts_ : whole_;
      times.last[times.n++ % kTrialsEach] = std::max<std::int64_t>(time.count(), 1);
    }
  }

  Told tell() const { return {times_, whole_.median(), parts_.median()}; }

  // What all ranks have told, in the exchange of one time.
  void hear(const std::vector<Told>& everyones) {
    std::int64_t whole = 0;
    std::int64_t parts = 0;
    bool is_known = true;
    for (const Told& told : everyones) {
      times_ = std::max(times_, told.times);
      whole += told.whole_ns;
      parts += told.parts_ns;
      is_known = is_known && told.whole_ns > 0 && told.parts_ns > 0;
    }
    prefers_parts_ = is_known && static_cast<double>(parts) < kAtMost * static_cast<double>(whole);
    ++times_;
    if (times_ % kPeriod == 0) {
      whole_ = {};
      parts_ = {};
    }
  }

 private:
  static constexpr std::size_t kTrialsEach = 8;
  static constexpr std::int64_t kPeriod = 1024;
  // It has to be worth the trouble.
  static constexpr double kAtMost = 0.98;

  struct Times {
    std::array<std::int64_t, kTrialsEach> last{};
    std::size_t n = 0;

    std::int64_t median() const {
      const std::size_t known = std::min(n, kTrialsEach);
      if (known < kTrialsEach / 2) {
        return 0;
      }
      auto sorted = last;
      std::sort(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(known));
      return sorted[known / 2];
    }
  };

  bool is_trying() const { return times_ % kPeriod < 2 * static_cast<std::int64_t>(kTrialsEach); }

  std::int64_t times_ = 0;
  bool prefers_parts_ = false;
  Times whole_;
  Times parts_;
};

}  // namespace horon
