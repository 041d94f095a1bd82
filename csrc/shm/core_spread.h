// Which core a rank should be on.
//
// Note [Ranks spread over cores]
// An operation takes as long as the core with the most ranks. Linux's balancer leaves three ranks
// on one core and one on the other for as long as they exchange messages: threads that ran a moment
// ago are cache-hot, and those are not moved. With a core for every rank it leaves the threads on
// which two ranks' asynchronous operations run on one core, too. So every rank tells where it runs,
// and the highest ranks on a core that has more than its share move, each to the emptiest core that
// those above it leave, by way of their threads' affinity, which is as it was afterwards. One look
// decides nothing: it takes two in a row, and more after each move, so that whoever has another
// opinion about our cores is not fought all the time.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace horon {

// Pure. `cores[r]` is where rank r runs, -1 where that is not known; `allowed`: where this rank's
// thread may run. The core that it should move to; none if it should stay. Ranks with the same
// picture and the same cores allowed move to different ones.
std::optional<int> better_core(const std::vector<int>& cores, int rank,
                               const std::vector<int>& allowed);

// Has the calling thread go on on `core`, one that it may run on, and leaves its affinity as it
// was. A thread that had none of its own, but what the cgroup gives it, has none afterwards either,
// so that it follows when that changes. False where the system refuses.
bool move_to_core(int core);

// When to move. Thread safety: none; used by the thread that waits.
class CoreSpread {
 public:
  static constexpr std::uint32_t kLooks = 2;       // in a row, from one core to the same one
  static constexpr std::uint32_t kMostLooks = 64;  // doubled by each move up to here
  static constexpr std::uint32_t kCalmLooks = 32;  // without a better core: kLooks again

  // One look at where the ranks are; the core to move to now, if any.
  std::optional<int> look(const std::vector<int>& cores, int rank, const std::vector<int>& allowed);

 private:
  std::uint32_t needed_ = kLooks;
  std::pair<int, int> agreed_{-1, -1};  // from, to
  std::uint32_t agreeing_ = 0;
  std::uint32_t calm_ = 0;
};

}  // namespace horon
