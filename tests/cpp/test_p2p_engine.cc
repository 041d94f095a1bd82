#include "p2p/p2p_engine.h"

#include <future>

#include "catch.h"
#include "p2p_endpoint.h"
#include "thread_activity.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kSizes[] = {0, 1, 511, 512, 513, 1024, 4000, 4096, 100000};

}  // namespace

TEST_CASE("p2p: messages of all sizes, send first and receive first") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  unsigned seed = 0;
  for (const bool send_first : {true, false}) {
    for (const std::size_t bytes : kSizes) {
      INFO(bytes << " bytes");
      std::unique_ptr<Pending> sent;
      std::unique_ptr<Pending> received;
      if (send_first) {
        sent = a.send(1, 5, message(++seed, bytes));
        received = b.receive(0, 5, bytes);
      } else {
        received = b.receive(0, 5, bytes);
        sent = a.send(1, 5, message(++seed, bytes));
      }
      REQUIRE_NOTHROW(received->finish());
      REQUIRE_NOTHROW(sent->finish());
      REQUIRE(received->data() == message(seed, bytes));
      REQUIRE(received->source() == 0);
    }
  }
}

TEST_CASE("p2p: a sender is told of room and answer, once") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto& bell = group.segment(1)->words(0).doorbell;
  SECTION("of room alone, when nobody has asked for the message") {
    const auto sent = a.send(1, 5, message(1, 8));
    const std::uint32_t before = bell;
    b.engine().poll();
    REQUIRE(bell == before + 1);
    const auto received = b.receive(0, 5, 8);
    REQUIRE(bell == before + 2);  // the answer
    REQUIRE_NOTHROW(received->finish());
    REQUIRE_NOTHROW(sent->finish());
  }
  SECTION("of both") {
    const auto received = b.receive(0, 5, 8);
    const std::uint32_t before = bell;
    const auto sent = a.send(1, 5, message(1, 8));
    b.engine().poll();
    REQUIRE_NOTHROW(received->finish());
    REQUIRE_NOTHROW(sent->finish());
    REQUIRE(bell == before + 1);
  }
}

TEST_CASE("p2p: matching is by tag, in the order of sending within a tag") {
  for (const std::size_t bytes : {8UL, 512UL, 2000UL}) {
    LocalGroup group(2);
    Endpoint a(group, 0);
    Endpoint b(group, 1);
    std::vector<std::unique_ptr<Pending>> sends;
    for (unsigned i = 0; i < 6; ++i) {
      sends.push_back(a.send(1, static_cast<int>(i % 2), message(i, bytes)));
    }
    for (const unsigned i : {1U, 3U, 0U, 5U, 2U, 4U}) {
      const auto received = b.receive(0, static_cast<int>(i % 2), bytes);
      REQUIRE_NOTHROW(received->finish());
      REQUIRE(received->data() == message(i, bytes));
    }
    for (const auto& sent : sends) {
      REQUIRE_NOTHROW(sent->finish());
    }
  }
}

TEST_CASE("p2p: receives that wait are met in their order") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  std::vector<std::unique_ptr<Pending>> receives;
  for (unsigned i = 0; i < 6; ++i) {
    receives.push_back(b.receive(0, static_cast<int>(i % 2), i < 3 ? 100 : 3000));
  }
  for (const unsigned i : {1U, 3U, 0U, 5U, 2U, 4U}) {
    a.send(1, static_cast<int>(i % 2), message(i, i < 3 ? 100 : 3000))->finish();
  }
  for (unsigned i = 0; i < 6; ++i) {
    REQUIRE_NOTHROW(receives[i]->finish());
    REQUIRE(receives[i]->data() == message(i, i < 3 ? 100 : 3000));
  }
}

TEST_CASE("p2p: a receive from any source tells which one it was") {
  LocalGroup group(3);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  Endpoint c(group, 2);
  for (const std::size_t bytes : {16UL, 5000UL}) {
    const auto first = c.receive(kAnySource, 1, bytes);
    const auto from_b = b.send(2, 1, message(1, bytes));
    REQUIRE_NOTHROW(first->finish());
    REQUIRE(first->source() == 1);
    REQUIRE(first->data() == message(1, bytes));
    const auto from_a = a.send(2, 1, message(2, bytes));
    const auto second = c.receive(kAnySource, 1, bytes);
    REQUIRE_NOTHROW(second->finish());
    REQUIRE(second->source() == 0);
    REQUIRE(second->data() == message(2, bytes));
    REQUIRE_NOTHROW(from_a->finish());
    REQUIRE_NOTHROW(from_b->finish());
  }
}

TEST_CASE("p2p: a rank may send to itself") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  for (const std::size_t bytes : kSizes) {
    const auto received = a.receive(0, 3, bytes);
    const auto sent = a.send(0, 3, message(9, bytes));
    REQUIRE_NOTHROW(received->finish());
    REQUIRE_NOTHROW(sent->finish());
    REQUIRE(received->data() == message(9, bytes));
  }
}

TEST_CASE("p2p: different sizes fail both ends, and later messages work") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  struct Row {
    std::size_t sent, expected;
  };
  for (const Row& row : {Row{16, 8}, Row{8, 16}, Row{0, 1}, Row{512, 513}, Row{5000, 16},
                         Row{16, 5000}, Row{5000, 6000}}) {
    for (const bool send_first : {true, false}) {
      INFO(row.sent << " bytes to a receive of " << row.expected);
      std::unique_ptr<Pending> sent;
      std::unique_ptr<Pending> received;
      if (send_first) {
        sent = a.send(1, 0, message(1, row.sent));
        received = b.receive(0, 0, row.expected);
      } else {
        received = b.receive(0, 0, row.expected);
        sent = a.send(1, 0, message(1, row.sent));
      }
      const std::exception_ptr receive_error = received->error();
      const std::exception_ptr send_error = sent->error();
      REQUIRE(threw<MismatchError>(receive_error));
      REQUIRE(contains(text_of(receive_error), concat("recv of ", row.expected,
                                                      " bytes from rank 0, tag 0: "
                                                      "the sender sent ",
                                                      row.sent, " bytes")));
      REQUIRE(threw<MismatchError>(send_error));
      REQUIRE(contains(text_of(send_error), concat("send of ", row.sent,
                                                   " bytes to rank 1, tag 0: "
                                                   "the receiver expects ",
                                                   row.expected, " bytes")));
      REQUIRE(received->data() == Bytes(row.expected));  // nothing was written
      for (const std::size_t bytes : {16UL, 5000UL}) {
        const auto again = a.send(1, 0, message(2, bytes));
        const auto good = b.receive(0, 0, bytes);
        REQUIRE_NOTHROW(good->finish());
        REQUIRE_NOTHROW(again->finish());
        REQUIRE(good->data() == message(2, bytes));
      }
    }
  }
}

TEST_CASE("p2p: many messages in all directions at once") {
  constexpr int kRanks = 3;
  const unsigned n_messages = kHasThreadSanitizer ? 60 : 200;
  LocalGroup group(kRanks);
  const auto size_of = [](unsigned i) {
    return std::size(kSizes) > i % 12 ? kSizes[i % 12] % 5000 : i % 700;
  };
  const auto seed_of = [](int source, int destination, unsigned i) {
    return static_cast<unsigned>(source * 100000 + destination * 10000) + i;
  };
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (int rank = 0; rank < kRanks; ++rank) {
    endpoints.push_back(std::make_unique<Endpoint>(group, rank));
  }
  require_no_errors(run_ranks(kRanks, [&](int rank) {
    Endpoint& own = *endpoints[static_cast<std::size_t>(rank)];
    std::vector<std::unique_ptr<Pending>> all;
    std::vector<std::pair<Pending*, unsigned>> receives;
    for (unsigned i = 0; i < n_messages; ++i) {
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == rank) {
          continue;
        }
        all.push_back(
            own.send(peer, static_cast<int>(i % 3), message(seed_of(rank, peer, i), size_of(i))));
        all.push_back(own.receive(peer, static_cast<int>(i % 3), size_of(i)));
        receives.emplace_back(all.back().get(), seed_of(peer, rank, i));
      }
    }
    for (const auto& pending : all) {
      pending->finish();
    }
    for (const auto& [pending, seed] : receives) {
      expect(pending->data() == message(seed, pending->data().size()), "a message is damaged");
    }
  }));
}

TEST_CASE("p2p: large messages through small rings in both directions at once") {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  require_no_errors(run_ranks(2, [&](int rank) {
    Endpoint& own = rank == 0 ? a : b;
    for (unsigned round = 0; round < 2; ++round) {
      const auto sent =
          own.send(1 - rank, 0, message(round * 2 + static_cast<unsigned>(rank), kBytes));
      const auto received = own.receive(1 - rank, 0, kBytes);
      received->finish();
      sent->finish();
      expect(received->data() == message(round * 2 + static_cast<unsigned>(1 - rank), kBytes),
             "damaged");
    }
  }));
}

TEST_CASE("p2p: an unreceived large message blocks nobody") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto large = a.send(1, 1, message(1, 100000));
  for (unsigned i = 0; i < 100; ++i) {
    const auto small = a.send(1, 2, message(i, 400));
    const auto received = b.receive(0, 2, 400);
    REQUIRE_NOTHROW(received->finish());
    REQUIRE_NOTHROW(small->finish());
    REQUIRE(received->data() == message(i, 400));
  }
  REQUIRE_FALSE(large->is_done());
  const auto received = b.receive(0, 1, 100000);
  REQUIRE_NOTHROW(received->finish());
  REQUIRE_NOTHROW(large->finish());
  REQUIRE(received->data() == message(1, 100000));
}

TEST_CASE("p2p: small sends without a receive are done after a while, and are still received") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto sent = a.send(1, 0, message(1, 64));
  const auto other = b.send(0, 0, message(2, 64));
  REQUIRE_NOTHROW(sent->finish());  // both send first
  REQUIRE_NOTHROW(other->finish());
  const auto received = b.receive(0, 0, 64);
  REQUIRE_NOTHROW(received->finish());
  REQUIRE(received->data() == message(1, 64));
  // A size that differs can only be told to the receiver now.
  const auto again = a.send(1, 0, message(3, 64));
  REQUIRE_NOTHROW(again->finish());
  const auto wrong = b.receive(0, 0, 65);
  REQUIRE(threw<MismatchError>(wrong->error()));
}

TEST_CASE("p2p: more unreceived small messages than a ring holds wait for their receives") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  std::vector<std::unique_ptr<Pending>> sends;
  for (unsigned i = 0; i < 150; ++i) {  // beyond the bound of 64 eager messages, too
    sends.push_back(a.send(1, static_cast<int>(i), message(i, 512)));
  }
  for (unsigned i = 150; i-- > 0;) {  // the last one first
    const auto received = b.receive(0, static_cast<int>(i), 512);
    REQUIRE_NOTHROW(received->finish());
    REQUIRE(received->data() == message(i, 512));
  }
  for (const auto& sent : sends) {
    REQUIRE_NOTHROW(sent->finish());
  }
}

TEST_CASE("p2p: close lets sends finish, fails what is left, and takes nothing after") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto sent = a.send(1, 0, message(1, 50000));
  const auto received = b.receive(0, 0, 50000);
  const auto never = a.receive(1, 4, 8);
  a.engine().close(patient(), "closed by the test");
  a.engine().close(patient(), "closed again");
  REQUIRE_NOTHROW(sent->finish());
  REQUIRE_NOTHROW(received->finish());
  REQUIRE(received->data() == message(1, 50000));
  const std::exception_ptr error = never->error();
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "closed by the test"));
  REQUIRE_THROWS_AS(a.send(1, 0, message(1, 8)), GroupError);
  REQUIRE_THROWS_AS(a.receive(1, 0, 8), GroupError);
}

TEST_CASE("p2p: a timeout fails the operation and ends the group for all") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto other = b.receive(0, 9, 8);
  const auto received = a.receive(1, 2, 24, soon());
  const std::exception_ptr error = received->error();
  REQUIRE(threw<TimeoutError>(error));
  REQUIRE(contains(text_of(error), "recv of 24 bytes from rank 1, tag 2: Timed out waiting 150ms"));
  const std::exception_ptr other_error = other->error();
  REQUIRE(threw<GroupError>(other_error));
  REQUIRE(contains(text_of(other_error), "rank 0: recv of 24 bytes from rank 1, tag 2 timed out"));
}

TEST_CASE("p2p: a large send times out as well") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  REQUIRE(threw<TimeoutError>(a.send(1, 0, message(1, 5000), soon())->error()));
}

TEST_CASE("p2p: what a departed or dead peer sent still arrives and the rest fails") {
  for (const bool dies : {false, true}) {
    LocalGroup group(3);
    group.make_mortal();
    Endpoint a(group, 0);
    {
      Endpoint b(group, 1);
      const auto sent = b.send(0, 0, message(1, 300));
      const auto streamed = b.send(0, 1, message(2, 60000));
      const auto half = a.receive(1, 1, 60000);
      REQUIRE_NOTHROW(half->finish());
      REQUIRE_NOTHROW(streamed->finish());
      b.engine().close(patient(), "goodbye");
    }
    dies ? group.kill(1) : group.segment(1)->depart(1);
    const auto received = a.receive(1, 0, 300);
    REQUIRE_NOTHROW(received->finish());
    REQUIRE(received->data() == message(1, 300));
    for (const auto& lost :
         {a.receive(1, 0, 300), a.receive(1, 0, 9), a.send(1, 0, message(1, 5000))}) {
      const std::exception_ptr error = lost->error();
      REQUIRE(threw<PeerLostError>(error));
      REQUIRE(contains(text_of(error), "rank 1 (pid "));
      REQUIRE(contains(text_of(error), dies ? "died" : "left the group"));
    }
    // The others still talk.
    Endpoint c(group, 2);
    const auto sent = c.send(0, 0, message(3, 2000));
    const auto good = a.receive(2, 0, 2000);
    REQUIRE_NOTHROW(good->finish());
    REQUIRE_NOTHROW(sent->finish());
  }
}

TEST_CASE("p2p: a receive from any source fails when nobody is left, or anybody died") {
  for (const bool dies : {false, true}) {
    LocalGroup group(3);
    group.make_mortal();
    Endpoint a(group, 0);
    const auto received = a.receive(kAnySource, 0, 8);
    if (dies) {
      group.kill(2);
    } else {
      group.segment(1)->depart(1);
      group.segment(2)->depart(2);
    }
    REQUIRE(threw<PeerLostError>(received->error()));
  }
}

TEST_CASE("p2p: a receive from any source depends on its sender alone once it has met it") {
  for (const bool dies : {false, true}) {
    LocalGroup group(4);
    group.make_mortal();
    Endpoint a(group, 0);
    auto b = std::make_unique<Endpoint>(group, 1);
    Endpoint c(group, 2);
    constexpr std::size_t kBytes = std::size_t{4} << 20;
    const auto cut_off = a.receive(kAnySource, 1, kBytes);
    const auto sent = b->send(0, 1, message(1, kBytes));
    a.engine().poll();  // the announcement has met its receive
    const auto whole = a.receive(kAnySource, 2, 60000);
    const auto sent_whole = c.send(0, 2, message(2, 60000));
    a.engine().poll();
    b->engine().close(Deadline::after(std::chrono::milliseconds(0)), "goodbye");
    dies ? group.kill(1) : group.segment(1)->depart(1);
    // Unless the background threads were so much faster than this one that they have moved it all.
    if (const std::exception_ptr error = cut_off->error()) {
      REQUIRE(threw<PeerLostError>(error));
      REQUIRE(contains(text_of(error), "rank 1 (pid "));
      REQUIRE(contains(text_of(error), dies ? "died" : "left the group"));
    } else {
      REQUIRE(cut_off->data() == message(1, kBytes));
    }
    REQUIRE_NOTHROW(whole->finish());
    REQUIRE(whole->data() == message(2, 60000));
    REQUIRE_NOTHROW(sent_whole->finish());
  }
}

TEST_CASE("p2p: poison fails everything with its text") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  const auto received = a.receive(1, 0, 8);
  group.segment(1)->poison(1, "rank 1 says no");
  REQUIRE(contains(text_of(received->error()), "rank 1 says no"));
}

TEST_CASE("p2p: in a group that has ended nothing is sent any more") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto received = b.receive(0, 0, 8);
  group.segment(1)->poison(1, "rank 1 says no");
  REQUIRE_THROWS_WITH(a.send(1, 0, message(1, 8)), Catch::Contains("rank 1 says no"));
  REQUIRE_THROWS_WITH(a.receive(1, 0, 8), Catch::Contains("rank 1 says no"));
  REQUIRE(contains(text_of(received->error()), "rank 1 says no"));
}

TEST_CASE("p2p: a callback may start the next operation") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  constexpr int kRounds = 50;
  std::promise<void> done;
  Bytes ball(64);
  const auto start = [&](Endpoint& end, bool is_send, auto callback) {
    auto op = std::make_shared<TestMessage>();
    op->is_send = is_send;
    op->peer = &end == &a ? 1 : 0;
    op->data = ball.data();
    op->bytes = 0;
    op->deadline = patient();
    op->callback = callback;
    end.engine().start(op);
  };
  int round = 0;  // only touched in the chain of callbacks
  std::function<void()> receive_next = [&] {
    start(b, false, [&] {
      if (++round == kRounds) {
        done.set_value();
      } else {
        receive_next();
      }
    });
  };
  receive_next();
  for (int i = 0; i < kRounds; ++i) {
    start(a, true, [] {});
  }
  auto outcome = done.get_future();
  REQUIRE(outcome.wait_until(patient().at()) == std::future_status::ready);
  REQUIRE_NOTHROW(outcome.get());
}

TEST_CASE("p2p: an operation is let go of with no lock held") {
  LocalGroup group(1);
  Endpoint a(group, 0);
  struct InDestructor {
    std::function<void()> action;
    ~InDestructor() { action(); }
  };
  std::promise<void> destroyed;
  const auto receive = a.receive(0, 1, 4);  // keeps the background thread busy
  std::unique_ptr<Pending> answered;
  {
    auto last_words = std::make_shared<InDestructor>();
    last_words->action = [&] {
      answered = a.send(0, 1, message(1, 4));  // takes the engine's lock
      destroyed.set_value();
    };
    auto op = std::make_shared<TestMessage>();
    std::byte data[8];
    op->data = data;
    op->bytes = sizeof data;
    op->tag = 2;
    op->deadline = patient();
    op->on_done = [last_words](std::exception_ptr, int) {};
    last_words.reset();
    a.engine().start(op);
    op.reset();
    a.send(0, 2, message(2, 8))->finish();
  }
  if (destroyed.get_future().wait_until(patient().at()) != std::future_status::ready) {
    std::cerr << "the engine destroys operations with its lock held; giving up\n";
    std::abort();
  }
  REQUIRE_NOTHROW(receive->finish());
  REQUIRE_NOTHROW(answered->finish());
}

TEST_CASE("p2p: the background thread sleeps when nothing is pending") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  std::promise<long> thread_id;
  auto op = std::make_shared<TestMessage>();
  std::byte data[8];
  op->peer = 1;
  op->data = data;
  op->bytes = sizeof data;
  op->deadline = patient();
  op->on_done = [&](std::exception_ptr, int) { thread_id.set_value(current_thread_id()); };
  a.engine().start(op);
  b.send(0, 0, message(1, 8))->finish();
  REQUIRE(comes_to_rest(thread_id.get_future().get()));
}
