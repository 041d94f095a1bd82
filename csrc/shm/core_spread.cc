#include "shm/core_spread.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace horon {
namespace {

int ranks_on(const std::vector<int>& cores, int core) {
  return static_cast<int>(std::count(cores.begin(), cores.end(), core));
}

// Where the highest rank of core `own` should go; none if nowhere is better.
std::optional<int> emptier_than(const std::vector<int>& cores, int own,
                                const std::vector<int>& allowed) {
  std::optional<int> emptiest;
  int fewest = ranks_on(cores, own) - 1;  // that core must have fewer afterwards than this one now
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

}  // namespace

std::optional<int> better_core(const std::vector<int>& cores, int rank,
                               const std::vector<int>& allowed) {
  const int n_ranks = static_cast<int>(cores.size());
  const int n_cores = std::max(1, static_cast<int>(allowed.size()));
  const int share = (n_ranks + n_cores - 1) / n_cores;
  const int own = cores[static_cast<std::size_t>(rank)];
  if (own < 0 || ranks_on(cores, own) <= share) {
    return std::nullopt;
  }
  std::vector<int> settled = cores;  // from the highest rank down, where each will be
  for (int other = n_ranks - 1; other >= rank; --other) {
    int& core = settled[static_cast<std::size_t>(other)];
    if (core < 0 || ranks_on(settled, core) <= share) {
      continue;
    }
    if (const auto better = emptier_than(settled, core, allowed)) {
      if (other == rank) {
        return better;
      }
      core = *better;
    }
  }
  return std::nullopt;
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
  // The kernel keeps what was asked for, and applies what the cgroup allows of it now: asking for
  // everything is how to have no affinity of one's own.
  cpu_set_t everything;
  std::memset(&everything, 0xff, sizeof everything);
  cpu_set_t now;
  CPU_ZERO(&now);
  if (::sched_setaffinity(0, sizeof everything, &everything) == 0 &&
      ::sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &before)) {
    return true;
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
  const std::pair<int, int> move{cores[static_cast<std::size_t>(rank)], *core};
  if (std::exchange(agreed_, move) != move) {
    agreeing_ = 0;
  }
  if (++agreeing_ < needed_) {
    return std::nullopt;
  }
  agreeing_ = 0;
  needed_ = std::min(2 * needed_, kMostLooks);
  return core;
}

}  // namespace horon
