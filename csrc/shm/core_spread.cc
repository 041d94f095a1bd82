#include "shm/core_spread.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>

namespace horon {
namespace {

int ranks_on(const std::vector<int>& cores, int core) {
  return static_cast<int>(std::count(cores.begin(), cores.end(), core));
}

}  // namespace

std::optional<int> better_core(const std::vector<int>& cores, int rank,
                               const std::vector<int>& allowed) {
  const auto own_rank = static_cast<std::size_t>(rank);
  const int own = cores[own_rank];
  const bool is_highest = std::find(cores.begin() + rank + 1, cores.end(), own) == cores.end();
  if (own < 0 || !is_highest) {
    return std::nullopt;
  }
  const int here = ranks_on(cores, own);
  const int n_ranks = static_cast<int>(cores.size());
  const int n_cores = std::max(1, static_cast<int>(allowed.size()));
  const int share = (n_ranks + n_cores - 1) / n_cores;
  if (here <= share) {
    return std::nullopt;
  }
  std::optional<int> emptiest;
  int fewest = here - 1;  // moving there must leave that core with fewer than this one has now
  for (const int core : allowed) {
    const int there = ranks_on(cores, core);
    // Cores with near numbers mostly share a cache and memory.
    const bool is_nearer = emptiest && std::abs(core - own) < std::abs(*emptiest - own);
    if (there < fewest || (there == fewest && is_nearer)) {
      fewest = there;
      emptiest = core;
    }
  }
  return emptiest;
}

bool move_to_core(int core) {
  cpu_set_t before;
  CPU_ZERO(&before);
  if (::sched_getaffinity(0, sizeof before, &before) != 0 || !CPU_ISSET(core, &before)) {
    return false;
  }
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (::sched_setaffinity(0, sizeof only, &only) != 0) {
    return false;
  }
  return ::sched_setaffinity(0, sizeof before, &before) == 0;
}

std::optional<int> CoreSpread::look(const std::vector<int>& cores, int rank,
                                    const std::vector<int>& allowed) {
  const auto core = better_core(cores, rank, allowed);
  if (!core) {
    agreeing_ = 0;
    if (++calm_ >= kCalmLooks) {
      needed_ = kLooks;
    }
    return std::nullopt;
  }
  calm_ = 0;
  if (++agreeing_ < needed_) {
    return std::nullopt;
  }
  agreeing_ = 0;
  needed_ = std::min(2 * needed_, kMostLooks);
  return core;
}

}  // namespace horon
