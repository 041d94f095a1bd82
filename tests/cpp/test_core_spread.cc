#include "shm/core_spread.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

// Where all are when everybody has acted on one picture.
std::vector<int> after_moves(const std::vector<int>& cores, const std::vector<int>& allowed) {
  std::vector<int> after = cores;
  for (int rank = 0; rank < static_cast<int>(cores.size()); ++rank) {
    const auto own = static_cast<std::size_t>(rank);
    after[own] = better_core(cores, rank, allowed).value_or(cores[own]);
  }
  return after;
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
  for (const std::vector<int>& fair :
       {std::vector<int>{0, 1, 0, 1}, {0, 0, 0, 1, 1}, {0, 1}}) {  // five on two can not do better
    CHECK(after_moves(fair, two) == fair);
  }
}

TEST_CASE("core spread: who acts on one picture goes to different cores") {
  const std::vector<int> four = {0, 1, 2, 3};
  CHECK(after_moves({0, 0, 1, 1}, four) == std::vector<int>{0, 3, 1, 2});
  CHECK(after_moves({1, 1, 1, 1}, four) == std::vector<int>{1, 3, 2, 0});
  CHECK(after_moves({0, 0, 0, 0}, {0, 1}) == std::vector<int>{0, 0, 1, 1});
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

TEST_CASE("core spread: one mover at a time, or all at once, bring any start to fair shares") {
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
        const int share = (n_ranks + n_cores - 1) / n_cores;
        const auto check_shares = [&](const std::vector<int>& now) {
          for (const int core : all) {
            CHECK(std::count(now.begin(), now.end(), core) <= share);
          }
        };
        check_shares(after_moves(cores, all));
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
        check_shares(cores);
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
  CoreSpread other;
  const std::vector<int> four = {0, 1, 2, 3};
  CHECK_FALSE(other.look({0, 0, 0, 1}, 2, four));
  CHECK_FALSE(other.look({0, 3, 3, 1}, 2, four));  // to the same core, but from elsewhere: anew
  CHECK(other.look({0, 3, 3, 1}, 2, four) == 2);
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
