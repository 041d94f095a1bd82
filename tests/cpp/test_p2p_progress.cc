// Who moves messages: callers that wait, and the background thread.

#include "catch.h"
#include "p2p_endpoint.h"
#include "shm/p2p_engine.h"

using namespace horon;
using namespace horon::testing;

namespace {

void test_ping_pong(LocalGroup::Cores cores) {
  LocalGroup group(2);
  group.set_cores(cores);
  Endpoint ends[] = {Endpoint(group, 0), Endpoint(group, 1)};
  constexpr std::size_t kBytes[] = {0, 4, 1000, 5000, 300000};
  require_no_errors(run_ranks(2, [&](int rank) {
    Endpoint& own = ends[rank];
    for (int round = 0; round < 60; ++round) {
      const std::size_t bytes = kBytes[round % 5];
      const auto seed = static_cast<unsigned>(round);
      for (int turn = 0; turn < 2; ++turn) {
        if (turn == rank) {
          own.send(1 - rank, 7, message(seed, bytes))->help(own.engine());
        } else {
          const auto received = own.receive(1 - rank, 7, bytes);
          received->help(own.engine());
          expect(received->data() == message(seed, bytes), "round ", round);
        }
      }
    }
  }));
}

void test_several_threads(LocalGroup::Cores cores) {
  LocalGroup group(2);
  group.set_cores(cores);
  Endpoint ends[] = {Endpoint(group, 0), Endpoint(group, 1)};
  constexpr int kThreads = 3;
  constexpr int kRounds = 40;
  constexpr std::size_t kBytes[] = {16, 20000, 3};
  require_no_errors(run_ranks(2 * kThreads, [&](int number) {
    const int rank = number % 2;
    const int thread = number / 2;
    Endpoint& own = ends[rank];
    for (int round = 0; round < kRounds; ++round) {
      const std::size_t bytes = kBytes[(round + thread) % 3];
      const auto sent = own.send(1 - rank, thread, message(static_cast<unsigned>(round), bytes));
      const auto received = own.receive(1 - rank, thread, bytes);
      if ((round + thread) % 2 == 0) {
        received->help(own.engine());
        sent->help(own.engine());
      } else {  // the background thread's
        received->finish();
        sent->finish();
      }
      expect(received->data() == message(static_cast<unsigned>(round), bytes), "round ", round);
    }
  }));
}

}  // namespace

TEST_CASE("p2p progress: a ping-pong of callers that move their messages themselves") {
  test_ping_pong(LocalGroup::Cores::kOneEach);
}
TEST_CASE("p2p progress: the same in a crowd") { test_ping_pong(LocalGroup::Cores::kCrowd); }

TEST_CASE("p2p progress: waits of several threads, and operations that nobody waits for") {
  test_several_threads(LocalGroup::Cores::kOneEach);
}
TEST_CASE("p2p progress: the same of several threads in a crowd") {
  test_several_threads(LocalGroup::Cores::kCrowd);
}

TEST_CASE("p2p progress: the background thread goes on where a caller leaves off") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto later = a.receive(1, 2, 50000);
  const auto first = a.receive(1, 1, 4);
  b.send(0, 1, message(1, 4));
  first->help(a.engine());
  b.send(0, 2, message(2, 50000))->finish();
  later->finish();
  REQUIRE(later->data() == message(2, 50000));
}

TEST_CASE("p2p progress: what interrupts a wait leaves it, and the operation goes on") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto received = a.receive(1, 1, 4);
  struct Interrupt {};
  const std::function<void()> interrupt = [] { throw Interrupt(); };
  REQUIRE_THROWS_AS(received->help(a.engine(), &interrupt), Interrupt);
  b.send(0, 1, message(1, 4))->finish();
  received->finish();
  REQUIRE(received->data() == message(1, 4));
}

TEST_CASE("p2p progress: a wait ends with the engine, with poison and with a deadline") {
  LocalGroup group(2);
  {
    Endpoint a(group, 0);
    const auto received = a.receive(1, 1, 4);
    std::thread closer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      a.engine().close(Deadline::after(std::chrono::milliseconds(0)), "closed by the test");
    });
    REQUIRE_THROWS_AS(received->help(a.engine()), GroupError);
    closer.join();
  }
  Endpoint b(group, 1);
  const auto late = b.receive(0, 1, 4, soon());
  REQUIRE_THROWS_AS(late->help(b.engine()), TimeoutError);
  REQUIRE_THROWS_AS(b.receive(0, 2, 4)->help(b.engine()), GroupError);
}

TEST_CASE("p2p progress: polling alone brings a message to its end") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  const auto received = a.receive(1, 1, 100000);
  const auto sent = b.send(0, 1, message(1, 100000));
  const Deadline limit = patient();
  while (!received->is_done() && !limit.has_passed()) {
    a.engine().poll();
    b.engine().poll();
  }
  REQUIRE(received->is_done());
  REQUIRE(received->data() == message(1, 100000));
}
