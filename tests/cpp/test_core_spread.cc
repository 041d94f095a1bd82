#include "shm/core_spread.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

std::optional<int> mover_of(const std::vector<int>& cores, const std::vector<int>& allowed) {
  std::optional<int> mover;
  for (int rank = 0; rank < static_cast<int>(cores.size()); ++rank) {
    if (better_core(cores, rank, allowed)) {
      CHECK_FALSE(mover.has_value());  // never two at once
      mover = rank;
    }
  }
  return mover;
}

}  // namespace

TEST_CASE("core spread: the highest rank on an overfull core moves to the emptiest") {
  const std::vector<int> two = {0, 1};
  CHECK(better_core({0, 0, 0, 1}, 2, two) == 1);
  CHECK(better_core({0, 0, 0, 1}, 0, two) == std::nullopt);
  CHECK(better_core({0, 0, 0, 1}, 3, two) == std::nullopt);
  CHECK(better_core({1, 1, 1, 1}, 3, two) == 0);  // where nobody is
  const std::vector<int> three = {2, 5, 7};
  CHECK(better_core({2, 2, 2, 2, 5, 5, 7}, 3, three) == 7);
}

TEST_CASE("core spread: of equally empty cores the nearest") {
  const std::vector<int> eight = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(better_core({5, 5}, 1, eight) == 4);
  CHECK(better_core({5, 5, 4}, 1, eight) == 6);
  CHECK(better_core({0, 0}, 1, {0, 7, 3}) == 3);
}

TEST_CASE("core spread: a fair share stays") {
  const std::vector<int> two = {0, 1};
  CHECK(mover_of({0, 1, 0, 1}, two) == std::nullopt);
  CHECK(mover_of({0, 0, 0, 1, 1}, two) == std::nullopt);  // five on two cores can not do better
  CHECK(mover_of({0, 1}, two) == std::nullopt);
}

TEST_CASE("core spread: what is not known or not allowed") {
  const std::vector<int> two = {0, 1};
  CHECK(better_core({0, 0, 0, -1}, 3, two) == std::nullopt);  // own core not told
  CHECK(better_core({0, 0, 0, -1}, 2, two) == 1);
  CHECK(better_core({0, 0, 0, 1}, 2, {0}) == std::nullopt);
  CHECK(better_core({0, 0, 0, 1}, 2, {}) == std::nullopt);
  // Rank 2 may also use core 3, where nobody is; core 1 is not its own to use.
  CHECK(better_core({0, 0, 0, 1}, 2, {0, 3}) == 3);
}

TEST_CASE("core spread: one mover at a time brings any start to fair shares") {
  for (int n_cores = 1; n_cores <= 5; ++n_cores) {
    std::vector<int> all;
    for (int core = 0; core < n_cores; ++core) {
      all.push_back(2 * core);
    }
    for (int n_ranks = 1; n_ranks <= 11; ++n_ranks) {
      for (unsigned start = 0; start < 20; ++start) {
        CAPTURE(n_cores, n_ranks, start);
        std::vector<int> cores;
        unsigned state = 7 * start + 1;
        for (int rank = 0; rank < n_ranks; ++rank) {
          state = state * 1664525U + 1013904223U;
          cores.push_back(all[(state >> 16) % all.size()]);
        }
        int moves = 0;
        for (bool has_moved = true; has_moved && moves <= n_ranks; ++moves) {
          has_moved = false;
          for (int rank = 0; rank < n_ranks; ++rank) {
            if (const auto core = better_core(cores, rank, all)) {
              cores[static_cast<std::size_t>(rank)] = *core;
              has_moved = true;
              break;
            }
          }
        }
        REQUIRE(moves <= n_ranks);
        const int share = (n_ranks + n_cores - 1) / n_cores;
        for (const int core : all) {
          CHECK(std::count(cores.begin(), cores.end(), core) <= share);
        }
      }
    }
  }
}

TEST_CASE("core spread: moves after looks in a row, and later each time") {
  const std::vector<int> two = {0, 1};
  const std::vector<int> uneven = {0, 0, 0, 1};
  const std::vector<int> even = {0, 1, 0, 1};
  CoreSpread spread;
  const auto looks_until_move = [&] {
    std::uint32_t looks = 1;
    while (!spread.look(uneven, 2, two)) {
      ++looks;
      REQUIRE(looks <= CoreSpread::kMostLooks);
    }
    return looks;
  };
  CHECK(looks_until_move() == CoreSpread::kLooks);
  CHECK(looks_until_move() == 2 * CoreSpread::kLooks);
  CHECK_FALSE(spread.look(uneven, 2, two));
  CHECK_FALSE(spread.look(even, 2, two));  // begins anew
  CHECK(looks_until_move() == 4 * CoreSpread::kLooks);
  for (int i = 0; i < 20; ++i) {
    looks_until_move();
  }
  CHECK(looks_until_move() == CoreSpread::kMostLooks);
  for (std::uint32_t i = 0; i < CoreSpread::kCalmLooks; ++i) {
    CHECK_FALSE(spread.look(even, 2, two));
  }
  CHECK(looks_until_move() == CoreSpread::kLooks);
}

TEST_CASE("core spread: a thread moves and keeps its affinity") {
  std::thread([] {
    cpu_set_t before;
    CPU_ZERO(&before);
    if (::sched_getaffinity(0, sizeof before, &before) != 0) {
      return;  // more cores than the set can hold: nobody moves
    }
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      CHECK(move_to_core(core) == (CPU_ISSET(core, &before) != 0));
      cpu_set_t after;
      CPU_ZERO(&after);
      REQUIRE(::sched_getaffinity(0, sizeof after, &after) == 0);
      REQUIRE(CPU_EQUAL(&before, &after));
    }
  }).join();
}
