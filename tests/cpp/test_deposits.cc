#include "shm/deposits.h"

#include <cstring>
#include <memory>
#include <random>

#include "catch.h"
#include "collective_call.h"
#include "core/published_stream.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

// One rank's view of the deposits of a group.
struct Depositor {
  Depositor(const LocalGroup& group, int rank)
      : board(group.segment(rank), group.peers(rank)),
        deposits(group.segment(rank), &board, &store, rank) {}
  StepBoard board;
  SharedStore store;
  Deposits deposits;
};

// Operation `number` of a sequence that all ranks know.
Plan plan_of(unsigned number, int n_ranks) {
  std::mt19937 random(number * 31 + static_cast<unsigned>(n_ranks));
  Plan plan;
  constexpr OpKind kKinds[] = {OpKind::kBarrier,   OpKind::kAllReduce, OpKind::kBroadcast,
                               OpKind::kAllGather, OpKind::kScatter,   OpKind::kAllGatherSingle};
  plan.kind = kKinds[random() % std::size(kKinds)];
  plan.n_ranks = n_ranks;
  plan.root = static_cast<int>(random() % static_cast<unsigned>(n_ranks));
  plan.count = random() % 5 == 0 ? 0 : random() % 80;  // inline up to 64
  plan.seed = number;
  if (random() % 10 == 0) {
    plan.refusal = concat("refusal ", number);
  }
  return plan;
}

// The current operation's headers and messages, against what everybody was to bring.
void check_current(const Deposits& deposits, int n_ranks) {
  const auto number = static_cast<unsigned>(deposits.current());
  const Plan plan = plan_of(number, n_ranks);
  for (int peer = 0; peer < n_ranks; ++peer) {
    const HeaderView& view = deposits.headers()[static_cast<std::size_t>(peer)];
    const Header& header = *view.header;
    expect(header.sequence == number, "operation ", number, ": header ", header.sequence);
    expect(header.kind == plan.kind, "operation ", number, ": another kind");
    expect(header.arena_offset == number * 64, "operation ", number, ": another offset");
    if (!plan.refusal.empty()) {
      expect(header.is_refused != 0 && plan.refusal == view.refusal, "operation ", number,
             ": no refusal");
      continue;
    }
    const RankCall call(plan, peer);
    expect(header.published_bytes == published_bytes(call.request, peer, n_ranks), "operation ",
           number, ": ", header.published_bytes, " bytes");
    if (header.has_counts != 0) {
      for (std::size_t rank = 0; rank < static_cast<std::size_t>(n_ranks); ++rank) {
        expect(view.send_counts[rank] == call.request.send_counts[rank], "operation ", number,
               ": other counts");
        expect(view.recv_counts[rank] == call.request.recv_counts[rank], "operation ", number,
               ": other counts");
      }
    }
    expect((header.is_inline != 0) == (header.published_bytes <= 256), "operation ", number,
           ": inline or not");
    if (header.is_inline != 0) {
      Bytes stream(header.published_bytes);
      copy_from_stream(stream_pieces(call.request, peer, n_ranks), 0, stream.size(), stream.data());
      expect(stream.empty() || std::memcmp(stream.data(), view.inline_data, stream.size()) == 0,
             "operation ", number, ": the message of rank ", peer, " is damaged");
    }
  }
}

void deposit_next(Deposits& deposits, int rank, int n_ranks) {
  const RankCall call(plan_of(static_cast<unsigned>(deposits.next()), n_ranks), rank);
  deposits.deposit(call.request, deposits.next() * 64);
}

void finish_current(Deposits& deposits, int n_ranks) {
  deposits.await_all(patient_context());
  check_current(deposits, n_ranks);
  deposits.finish();
}

Options tiny_ring() {
  Options options = small_options();
  options.deposit_bytes = 4096;  // some ten operations
  return options;
}

}  // namespace

TEST_CASE("deposits: any number under way, on rings that wrap") {
  const std::uint64_t n_operations = kHasThreadSanitizer ? 400 : 3000;
  for (int n = 1; n <= 4; ++n) {
    const LocalGroup group(n, tiny_ring());
    require_no_errors(run_ranks(n, [&](int rank) {
      Depositor depositor(group, rank);
      Deposits& deposits = depositor.deposits;
      std::mt19937 random(static_cast<unsigned>(rank) + 1);  // each rank at its own pace
      std::uint64_t most = 0;
      while (deposits.current() < n_operations) {
        const bool is_behind = deposits.current() < deposits.next();
        if (deposits.next() < n_operations && (!is_behind || random() % 8 != 0)) {
          if (!is_behind) {
            deposits.await_room(patient_context());
          }
          if (deposits.has_room()) {
            deposit_next(deposits, rank, n);
            most = std::max(most, deposits.next() - deposits.current());
            continue;
          }
        }
        finish_current(deposits, n);
      }
      expect(most > 4, "never more than ", most, " under way");
    }));
  }
}

TEST_CASE("deposits: at most 256 operations are under way, and then it goes on") {
  const LocalGroup group(2);
  Depositor first(group, 0);
  Depositor second(group, 1);
  const Request barrier;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 256; ++i) {
      REQUIRE(first.deposits.has_room());
      first.deposits.deposit(barrier, 0);
    }
    REQUIRE_FALSE(first.deposits.has_room());
    REQUIRE_FALSE(first.deposits.have_all_arrived());
    for (int i = 0; i < 256; ++i) {
      REQUIRE(second.deposits.has_room());
      second.deposits.deposit(barrier, 0);
      REQUIRE(first.deposits.have_all_arrived());
      second.deposits.await_all(patient_context());
      REQUIRE(second.deposits.headers()[0].header->sequence == second.deposits.current());
      second.deposits.finish();
    }
    // The other rank is done with all of them, this one with none.
    REQUIRE_FALSE(first.deposits.has_room());
    first.deposits.await_all(patient_context());
    first.deposits.finish();
    REQUIRE(first.deposits.has_room());
    while (first.deposits.current() < first.deposits.next()) {
      first.deposits.await_all(patient_context());
      first.deposits.finish();
    }
  }
}

TEST_CASE("deposits: room comes when the last reader is done") {
  const LocalGroup group(3, tiny_ring());
  require_no_errors(run_ranks(3, [&](int rank) {
    Depositor depositor(group, rank);
    Deposits& deposits = depositor.deposits;
    Plan plan;
    plan.kind = OpKind::kAllReduce;
    plan.n_ranks = 3;
    plan.count = 64;
    for (int i = 0; i < 200; ++i) {
      plan.seed = static_cast<unsigned>(i);
      const RankCall call(plan, rank);
      deposits.await_room(patient_context());
      deposits.deposit(call.request, 0);
      if (rank == i % 3) {
        std::this_thread::yield();
      }
      deposits.await_all(patient_context());
      for (int peer = 0; peer < 3; ++peer) {
        const Bytes expected = plan.data(peer, 0);
        expect(std::memcmp(deposits.headers()[static_cast<std::size_t>(peer)].inline_data,
                           expected.data(), expected.size()) == 0,
               "operation ", i, ": rank ", peer, "'s message");
      }
      deposits.finish();
    }
  }));
}

TEST_CASE("deposits: a wait for room ends at its deadline and names who is behind") {
  const LocalGroup group(3, tiny_ring());
  std::vector<std::unique_ptr<Depositor>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<Depositor>(group, rank));
  }
  const Request barrier;
  while (ranks[0]->deposits.has_room()) {
    for (const auto& each : ranks) {
      each->deposits.deposit(barrier, 0);
    }
    for (const int rank : {0, 2}) {
      Deposits& deposits = ranks[static_cast<std::size_t>(rank)]->deposits;
      deposits.await_all(patient_context());
      deposits.finish();
    }
  }
  const std::exception_ptr error =
      error_of([&] { ranks[0]->deposits.await_room(WaitContext{soon(), nullptr}); });
  INFO(text_of(error));
  REQUIRE(threw<TimeoutError>(error));
  REQUIRE(contains(text_of(error), "for rank 1"));
  Deposits& late = ranks[1]->deposits;
  while (late.current() < late.next()) {
    late.await_all(patient_context());
    late.finish();
  }
  REQUIRE_NOTHROW(ranks[0]->deposits.await_room(WaitContext{soon(), nullptr}));
}

TEST_CASE("deposits: room to start leaves enough for the longest deposit of any rank") {
  const LocalGroup group(2, tiny_ring());
  Depositor first(group, 0);
  Depositor second(group, 1);
  Plan plan;
  plan.kind = OpKind::kBroadcast;
  plan.n_ranks = 2;
  plan.count = 64;
  plan.root = 0;
  for (int round = 0; round < 20; ++round) {
    // Rank 1 publishes nothing, and counts what the root does.
    int n_started = 0;
    while (second.deposits.has_room_to_start(256)) {
      second.deposits.deposit(RankCall(plan, 1).request, 0, 256);
      ++n_started;
    }
    INFO("round " << round << ", " << n_started << " started");
    REQUIRE(n_started >= 2);
    REQUIRE(n_started <= 8);
    for (int i = 0; i < n_started; ++i) {
      REQUIRE(first.deposits.has_room());
      first.deposits.deposit(RankCall(plan, 0).request, 0, 256);
      first.deposits.await_all(patient_context());
      first.deposits.finish();
    }
    for (int i = 0; i < n_started; ++i) {
      second.deposits.await_all(patient_context());
      second.deposits.finish();
    }
    // Ends the rings at other places each time.
    const Request barrier;
    for (Depositor* each : {&first, &second}) {
      each->deposits.deposit(barrier, 0);
    }
    for (Depositor* each : {&first, &second}) {
      each->deposits.await_all(patient_context());
      each->deposits.finish();
    }
  }
}
