#include "shm/claims.h"

#include <array>
#include <atomic>
#include <random>

#include "catch.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

// One rank's view of the claims of a group.
struct Claimer {
  Claimer(const LocalGroup& group, int rank)
      : segment(group.segment(rank)),
        board(group.segment(rank), group.peers(rank)),
        claims(segment, &board) {}

  // As in a transport: nobody begins a round while somebody may still be busy with the last but
  // one.
  void meet() {
    board.finish_step();
    board.await_all(patient_context());
  }

  Segment* const segment;
  StepBoard board;
  Claims claims;
};

// Does rounds of random numbers of slices; every slice leaves its number where all can read it.
// `before_round(claimer, round)` is called when the round has begun.
template <typename BeforeRound>
void run_rounds(int n_ranks, int n_rounds, std::uint32_t first_round,
                const BeforeRound& before_round) {
  const LocalGroup group(n_ranks);
  using Takers = std::array<std::atomic<int>, Claims::kMostSlices>;
  std::vector<Takers> taken(static_cast<std::size_t>(n_rounds));
  require_no_errors(run_ranks(n_ranks, [&](int rank) {
    Claimer claimer(group, rank);
    for (std::uint32_t round = 0; round < first_round; ++round) {
      claimer.claims.begin_round(1);  // takes no part
    }
    std::mt19937 random(17);  // the same on every rank
    for (int round = 0; round < n_rounds; ++round) {
      const std::uint32_t n_slices = round % 50 == 0     ? Claims::kMostSlices
                                     : random() % 6 == 0 ? 0
                                                         : random() % 12 + 1;
      claimer.meet();
      claimer.claims.begin_round(n_slices);
      before_round(claimer, rank, round, n_slices);
      auto* slices = reinterpret_cast<std::uint32_t*>(claimer.segment->data(0) +
                                                      2048 * static_cast<std::size_t>(round % 2));
      while (const auto slice = claimer.claims.claim()) {
        expect(*slice < n_slices, "round ", round, ": slice ", *slice, " of ", n_slices);
        taken[static_cast<std::size_t>(round)][*slice].fetch_add(1, std::memory_order_relaxed);
        slices[*slice] = static_cast<std::uint32_t>(round) * 1000 + *slice;
        claimer.claims.finish();
      }
      claimer.claims.await_all(patient_context());
      for (std::uint32_t slice = 0; slice < n_slices; ++slice) {
        expect(slices[slice] == static_cast<std::uint32_t>(round) * 1000 + slice, "round ", round,
               ": slice ", slice, " of ", n_slices, " is not there");
      }
      expect(!claimer.claims.claim(), "a slice was left after all were done");
    }
    claimer.meet();
    random.seed(17);
    for (int round = 0; round < n_rounds; ++round) {
      const std::uint32_t n_slices = round % 50 == 0     ? Claims::kMostSlices
                                     : random() % 6 == 0 ? 0
                                                         : random() % 12 + 1;
      for (std::uint32_t slice = 0; slice < Claims::kMostSlices; ++slice) {
        const int times = taken[static_cast<std::size_t>(round)][slice];
        expect(times == (slice < n_slices ? 1 : 0), "round ", round, ": slice ", slice, " of ",
               n_slices, " was done ", times, " times");
      }
    }
  }));
}

const auto nothing = [](Claimer&, int, int, std::uint32_t) {};

}  // namespace

TEST_CASE("claims: every slice is done once, by somebody, and all see it") {
  for (int n = 1; n <= 5; ++n) {
    run_rounds(n, kHasThreadSanitizer ? 60 : 500, 0, nothing);
  }
}

TEST_CASE("claims: who comes when everything is done takes nothing, and goes on") {
  for (const int n : {2, 3}) {
    run_rounds(n, 60, 0, [n](Claimer& claimer, int rank, int round, std::uint32_t n_slices) {
      if (rank != round % n || n_slices == 0) {
        return;
      }
      // Each rank is the late one in turn: it looks on until the others have done all.
      const std::atomic<std::uint32_t>& done =
          claimer.segment->head().claims[(round + 1) % 2].done.value;
      const auto expected = static_cast<std::uint32_t>(round + 1) << 8 | n_slices;
      while (done.load(std::memory_order_relaxed) != expected) {
        std::this_thread::yield();
      }
      expect(!claimer.claims.claim(), "a late rank could claim a slice");
    });
  }
}

TEST_CASE("claims: the number of the round wraps") { run_rounds(3, 40, (1U << 24) - 20, nothing); }

TEST_CASE("claims: too many slices are refused") {
  const LocalGroup group(2);
  Claimer claimer(group, 0);
  REQUIRE_THROWS_AS(claimer.claims.begin_round(Claims::kMostSlices + 1), Error);
}

TEST_CASE("claims: a slice that somebody took and never did is a timeout") {
  const LocalGroup group(2);
  Claimer first(group, 0);
  Claimer second(group, 1);
  for (Claimer* each : {&first, &second}) {
    each->claims.begin_round(2);
    REQUIRE(each->claims.claim());
  }
  first.claims.finish();
  const std::exception_ptr error =
      error_of([&] { first.claims.await_all(WaitContext{soon(), nullptr}); });
  INFO(text_of(error));
  REQUIRE(threw<TimeoutError>(error));
  REQUIRE(contains(text_of(error), "another rank had taken"));
  second.claims.finish();
  REQUIRE_NOTHROW(first.claims.await_all(WaitContext{soon(), nullptr}));
}

TEST_CASE("claims: a rank that dies with a slice in its hands is an error that names it") {
  LocalGroup group(3);
  group.make_mortal();
  const Errors errors = run_ranks(3, [&](int rank) {
    Claimer claimer(group, rank);
    claimer.claims.begin_round(3);
    expect(claimer.claims.claim().has_value(), "no slice");
    claimer.meet();  // one for each
    if (rank == 2) {
      group.kill(2);
      return;
    }
    claimer.claims.finish();
    claimer.claims.await_all(patient_context());
  });
  REQUIRE(!errors[2]);
  for (const std::size_t rank : {0, 1}) {
    INFO(text_of(errors[rank]));
    REQUIRE(threw<PeerLostError>(errors[rank]));
    REQUIRE(contains(text_of(errors[rank]), "rank 2 (pid "));
  }
}
