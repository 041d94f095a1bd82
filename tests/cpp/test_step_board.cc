#include "shm/step_board.h"

#include <atomic>
#include <random>

#include "catch.h"
#include "core/cpu_budget.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

StepBoard board_of(const LocalGroup& group, int rank) {
  return StepBoard(group.segment(rank), group.peers(rank));
}

void sleep_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

}  // namespace

TEST_CASE("after a step everybody sees what everybody wrote before it") {
  const int n_steps = kHasThreadSanitizer ? 400 : 2000;
  for (int n = 2; n <= 5; ++n) {
    LocalGroup group(n);
    const Errors errors = run_ranks(n, [&](int rank) {
      StepBoard board = board_of(group, rank);
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int i = 0; i < n_steps; ++i) {
        const std::size_t parity = i % 2;
        auto* own =
            reinterpret_cast<std::uint64_t*>(group.segment(rank)->data(rank) + 2048 * parity);
        for (int word = 0; word < 16; ++word) {
          own[word] = static_cast<std::uint64_t>(i) * 1000 + static_cast<std::uint64_t>(rank);
        }
        if (random() % 64 == 0) {
          std::this_thread::yield();
        }
        board.finish_step();
        board.await_all(patient_context());
        for (int peer = 0; peer < n; ++peer) {
          const auto* words = reinterpret_cast<const std::uint64_t*>(
              group.segment(rank)->data(peer) + 2048 * parity);
          for (int word = 0; word < 16; ++word) {
            const std::uint64_t expected =
                static_cast<std::uint64_t>(i) * 1000 + static_cast<std::uint64_t>(peer);
            expect(words[word] == expected, "step ", i, " peer ", peer, ": ", words[word]);
          }
        }
      }
      expect(board.missing_ranks().empty(), "somebody is missing at the end");
    });
    require_no_errors(errors);
  }
}

TEST_CASE("steps go on when the counters wrap") {
  const LocalGroup group(2);
  // A peer far ahead by less than half the range counts as arrived; one behind does not.
  StepBoard board = board_of(group, 0);
  board.finish_step();
  group.segment(1)->words(1).counter(Counter::kStep).value = 0x7fffffff;
  REQUIRE(board.missing_ranks().empty());
  group.segment(1)->words(1).counter(Counter::kStep).value = 0xffffffff;
  REQUIRE(board.missing_ranks() == std::vector<int>{1});
}

TEST_CASE("ranks tell where they run before others see their step") {
  const LocalGroup group(3);
  for (const bool is_crowded : {false, true}) {
    require_no_errors(run_ranks(3, [&](int rank) {
      Peers peers;
      peers.rank = rank;
      peers.peers.resize(3);
      peers.is_crowded = is_crowded;
      StepBoard board(group.segment(rank), &peers);
      board.finish_step();
      board.await_all(Counter::kStep, 1, patient_context());
      for (int peer = 0; peer < 3; ++peer) {
        if (group.segment(rank)->words(peer).core_plus_one.load() == 0) {
          throw std::runtime_error("a rank's step was seen, and not where it ran");
        }
      }
    }));
    for (int rank = 0; rank < 3; ++rank) {
      group.segment(0)->words(rank).core_plus_one = 0;
      for (int counter = 0; counter < kCounters; ++counter) {
        group.segment(0)->words(rank).counters[counter].value = 0;
      }
    }
  }
}

TEST_CASE("a rank leaves a core that has more than its share") {
  const int n_cores = static_cast<int>(allowed_cpus().size());
  if (n_cores < 2) {
    return;  // nowhere to go
  }
  for (const int n_ranks : {2, 4, n_cores, n_cores + 1}) {
    if (n_ranks > 16) {
      continue;  // a group in one process has n x n descriptors
    }
    CAPTURE(n_ranks);
    const LocalGroup group(n_ranks);
    Peers peers;
    peers.rank = n_ranks - 1;
    peers.peers.resize(static_cast<std::size_t>(n_ranks));
    peers.is_crowded = n_ranks > n_cores;
    StepBoard board(group.segment(peers.rank), &peers);
    board.finish_step();
    const auto& told = group.segment(peers.rank)->words(peers.rank).core_plus_one;
    const std::uint32_t crowded_core = told;
    for (int peer = 0; peer < peers.rank; ++peer) {
      group.segment(peers.rank)->words(peer).core_plus_one = crowded_core;
    }
    for (int wait = 0; wait < 100 && told == crowded_core; ++wait) {
      board.await_all(Counter::kStep, 0, patient_context());
    }
    REQUIRE(told != crowded_core);
  }
}

TEST_CASE("a late rank is waited for") {
  LocalGroup group(3);
  require_no_errors(run_ranks(3, [&](int rank) {
    StepBoard board = board_of(group, rank);
    for (int i = 0; i < 4; ++i) {
      if (i % 3 == rank) {
        sleep_a_little();
      }
      board.finish_step();
      board.await_all(patient_context());
    }
  }));
}

TEST_CASE("a timeout names exactly the missing ranks") {
  LocalGroup group(5);
  std::atomic<int> n_arrived{0};
  const Errors errors = run_ranks(5, [&](int rank) {
    if (rank == 1 || rank == 3) {
      return;
    }
    StepBoard board = board_of(group, rank);
    board.finish_step();
    ++n_arrived;
    while (n_arrived != 3) {
      std::this_thread::yield();
    }
    board.await_all(WaitContext{Deadline::after(std::chrono::milliseconds(150)), nullptr});
  });
  for (const int rank : {0, 2, 4}) {
    const std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
    INFO(text_of(error));
    REQUIRE(threw<TimeoutError>(error));
    REQUIRE(contains(text_of(error), "Timed out waiting 150ms for ranks 1 and 3"));
  }
}

TEST_CASE("a deadline that has passed already does not fail a wait for what is there") {
  LocalGroup group(2);
  StepBoard first = board_of(group, 0);
  StepBoard second = board_of(group, 1);
  second.finish_step();
  first.finish_step();
  const WaitContext context{Deadline::after(std::chrono::milliseconds(-5)), nullptr};
  REQUIRE_NOTHROW(first.await_all(context));
  first.finish_step();
  REQUIRE_THROWS_AS(first.await_all(context), TimeoutError);
}

TEST_CASE("a departed or dead peer fails only what it left unfinished") {
  for (const bool dies : {false, true}) {
    LocalGroup group(3);
    group.make_mortal();
    std::atomic<bool> is_gone{false};
    const Errors errors = run_ranks(3, [&](int rank) {
      StepBoard board = board_of(group, rank);
      board.finish_step();
      if (rank == 1) {
        dies ? group.kill(1) : group.segment(1)->depart(1);
        is_gone = true;
        return;
      }
      while (!is_gone) {
        std::this_thread::yield();
      }
      board.await_all(patient_context());  // it did this step
      board.finish_step();
      board.await_all(patient_context());  // but not this one
    });
    REQUIRE(!errors[1]);
    for (const int rank : {0, 2}) {
      const std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
      INFO(text_of(error));
      REQUIRE(threw<PeerLostError>(error));
      REQUIRE(contains(text_of(error), concat("rank 1 (pid ", ::getpid(), ")")));
      REQUIRE(contains(text_of(error), dies ? "died" : "left the group"));
    }
  }
}

TEST_CASE("a departure while others sleep wakes them") {
  LocalGroup group(3);
  const Errors errors = run_ranks(3, [&](int rank) {
    if (rank == 2) {
      sleep_a_little();
      group.segment(2)->depart(2);
      return;
    }
    StepBoard board = board_of(group, rank);
    board.finish_step();
    board.await_all(patient_context());
  });
  REQUIRE(threw<PeerLostError>(errors[0]));
  REQUIRE(threw<PeerLostError>(errors[1]));
}

TEST_CASE("abort wakes the waiter of its own rank with the first reason") {
  LocalGroup group(2);
  StepBoard board = board_of(group, 0);
  const Errors errors = run_ranks(2, [&](int rank) {
    if (rank == 1) {  // another thread of rank 0
      sleep_a_little();
      board.abort("had enough");
      board.abort("again");
      return;
    }
    board.finish_step();
    board.await_all(patient_context());
  });
  REQUIRE(threw<GroupError>(errors[0]));
  REQUIRE(text_of(errors[0]) == "had enough");
  REQUIRE(text_of(error_of([&] { board.await_all(patient_context()); })) == "had enough");
}

TEST_CASE("poison wakes all waiters with its text") {
  LocalGroup group(4);
  const Errors errors = run_ranks(4, [&](int rank) {
    if (rank == 3) {
      sleep_a_little();
      group.segment(3)->poison(3, "rank 3 says no");
      return;
    }
    StepBoard board = board_of(group, rank);
    board.finish_step();
    board.await_all(patient_context());
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    REQUIRE(threw<GroupError>(errors[rank]));
    REQUIRE(text_of(errors[rank]) == "rank 3 says no");
  }
}

TEST_CASE("what check_interrupt throws comes out, and the next wait works") {
  struct Interrupted {};
  LocalGroup group(2);
  StepBoard first = board_of(group, 0);
  StepBoard second = board_of(group, 1);
  const std::thread::id waiter = std::this_thread::get_id();
  int calls = 0;
  const std::function<void()> interrupt = [&] {
    REQUIRE(std::this_thread::get_id() == waiter);
    if (++calls == 2) {
      throw Interrupted();
    }
  };
  first.finish_step();
  REQUIRE_THROWS_AS(first.await_all(WaitContext{patient(), &interrupt}), Interrupted);
  REQUIRE(group.segment(0)->words(1).counter(Counter::kStep).waiters == 0);
  second.finish_step();
  REQUIRE_NOTHROW(first.await_all(patient_context()));
}

TEST_CASE("would_fail tells of a death, a departure and an end, not of a rank that is late") {
  for (const std::string how : {"late", "dies", "leaves", "poisons", "is done"}) {
    INFO(how);
    LocalGroup group(2);
    group.make_mortal();
    StepBoard first = board_of(group, 0);
    StepBoard second = board_of(group, 1);
    REQUIRE_FALSE(first.would_fail(Counter::kArrived, 1));
    if (how == "dies" || how == "is done") {
      how == "dies" ? void() : second.advance(Counter::kArrived);
      group.kill(1);
    } else if (how == "leaves") {
      group.segment(1)->depart(1);
    } else if (how == "poisons") {
      group.segment(1)->poison(0, "enough");
    }
    const bool expected = how == "dies" || how == "leaves" || how == "poisons";
    // It does not look every time.
    bool seen = false;
    for (int i = 0; i < (expected ? 1000 : 20) && !seen; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      seen = first.would_fail(Counter::kArrived, 1);
    }
    REQUIRE(seen == expected);
  }
}
