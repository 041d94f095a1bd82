// Who moves messages: callers that wait, and the background thread.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <thread>

#include "catch.h"
#include "core/nesting.h"
#include "in_child.h"
#include "no_threads.h"
#include "p2p/p2p_engine.h"
#include "p2p_endpoint.h"

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

// Of this process.
int n_threads() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int count = 0;
  while (status >> word) {
    if (word == "Threads:") {
      status >> count;
    }
  }
  return count;
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

TEST_CASE("p2p progress: where the system gives no thread, callers see deaths and deadlines") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return;  // the sanitizers need the address space that is taken away below
#endif
  enum class End { kDeath, kDeadline, kPollDeath, kBufferedAtClose };
  for (const End end : {End::kDeath, End::kDeadline, End::kPollDeath, End::kBufferedAtClose}) {
    INFO(static_cast<int>(end));
    REQUIRE(in_child([&] {
              LocalGroup group(2);
              group.make_mortal();
              Endpoint a(group, 0);
              Endpoint b(group, 1);
              const Bytes small = message(1, 4);
              if (!take_threads_away()) {
                return 10;
              }
              const int n_before = n_threads();
              if (end == End::kBufferedAtClose) {  // done when nobody has met it for a second
                const auto sent = a.send(1, 1, small);
                a.engine().close(patient(), "closed by the test");
                return n_threads() == n_before && sent->is_done() && !sent->error() ? 0 : 1;
              }
              const auto received = a.receive(1, 1, 4, end == End::kDeadline ? soon() : patient());
              if (end != End::kDeadline) {
                group.kill(1);
              }
              if (end == End::kPollDeath) {
                while (!received->is_done()) {
                  a.engine().poll();
                }
              } else {
                a.engine().help_until([&] { return received->is_done(); }, nullptr);
              }
              const std::exception_ptr error = received->error();
              const bool is_right =
                  end == End::kDeadline ? threw<TimeoutError>(error) : threw<PeerLostError>(error);
              return n_threads() == n_before && is_right ? 0 : 1;
            }) == 0);
  }
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

TEST_CASE("p2p progress: a callback waits for what it has left to the background thread") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  constexpr int kRounds = 20;
  std::vector<Bytes> received(kRounds + 1, Bytes(70000));
  std::promise<void> end;
  // Each message's callback receives the next one and waits for it, inside the callback before.
  std::function<void(int)> receive = [&](int number) {
    auto came = std::make_shared<std::promise<void>>();
    auto op = std::make_shared<TestMessage>();
    op->peer = 1;
    op->tag = number;
    op->data = received[static_cast<std::size_t>(number)].data();
    op->bytes = received[static_cast<std::size_t>(number)].size();
    op->deadline = patient();
    op->on_done = [&, number, came](std::exception_ptr, int) {
      if (number == kRounds) {
        end.set_value();
      } else {
        receive(number + 1);
      }
      came->set_value();
    };
    a.engine().start(op);
    expect(a.engine().watch(), "nobody watches");
    if (number > 0 && came->get_future().wait_until(patient().at()) != std::future_status::ready) {
      std::cerr << "a callback waits for its own thread; giving up\n";
      std::abort();
    }
  };
  receive(0);
  for (int number = 0; number <= kRounds; ++number) {
    b.send(0, number, message(static_cast<unsigned>(number), 70000))->finish();
  }
  REQUIRE(end.get_future().wait_until(patient().at()) == std::future_status::ready);
  for (int number = 0; number <= kRounds; ++number) {
    REQUIRE(received[static_cast<std::size_t>(number)] ==
            message(static_cast<unsigned>(number), 70000));
  }
}

TEST_CASE(
    "p2p progress: threads whose place was taken end, and close waits for those that have not") {
  LocalGroup group(2);
  std::atomic<bool> has_come_back{false};
  {
    Endpoint a(group, 0);
    Endpoint b(group, 1);
    const auto left = a.receive(1, 99, 4);  // there is always something to be watched
    constexpr int kRounds = 30;
    for (int round = 0; round <= kRounds; ++round) {
      const bool is_last = round == kRounds;
      auto done = std::make_shared<std::promise<void>>();
      auto data = std::make_shared<Bytes>(4);
      auto op = std::make_shared<TestMessage>();
      op->peer = 1;
      op->data = data->data();
      op->bytes = data->size();
      op->deadline = patient();
      op->on_done = [&, is_last, data, done](std::exception_ptr, int) {
        expect(a.engine().watch() && a.engine().watch(), "nobody watches");
        done->set_value();
        if (is_last) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          has_come_back = true;
        }
      };
      a.engine().start(op);
      b.send(0, 0, message(1, 4))->finish();
      REQUIRE(done->get_future().wait_until(patient().at()) == std::future_status::ready);
    }
    REQUIRE(n_threads() < 15);
  }
  REQUIRE(has_come_back);
}

namespace {

// Of rank 0, from rank 1, started; `then` is the callback.
void receive_and(Endpoint& end, int tag, Bytes* into, std::function<void()> then) {
  auto op = std::make_shared<TestMessage>();
  op->peer = 1;
  op->tag = tag;
  op->data = into->data();
  op->bytes = into->size();
  op->deadline = patient();
  op->callback = std::move(then);
  end.engine().start(op);
}

void wait_or_give_up(std::promise<void>& promise) {
  if (promise.get_future().wait_until(patient().at()) != std::future_status::ready) {
    std::cerr << "a callback waits for what nobody moves; giving up\n";
    std::abort();
  }
}

}  // namespace

TEST_CASE("p2p progress: a callback waits for one that has finished behind it") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  for (const bool has_thread : {false, true}) {
    std::vector<Bytes> received(2, Bytes(8));
    if (has_thread) {  // and is awake
      const auto bytes = message(3, 8);
      const auto early = a.receive(1, 7, 8);
      b.send(0, 7, bytes)->finish();
      early->finish();
    }
    std::promise<void> second;
    std::atomic<bool> is_over{false};
    receive_and(a, 1, &received[0], [&] {
      expect(a.engine().watch(), "nobody watches");
      wait_or_give_up(second);
      is_over = true;
    });
    receive_and(a, 2, &received[1], [&] { second.set_value(); });
    const auto first_sent = b.send(0, 1, message(1, 8));
    const auto second_sent = b.send(0, 2, message(2, 8));
    while (!is_over) {
      a.engine().poll();
    }
    first_sent->finish();
    second_sent->finish();
    REQUIRE(received[1] == message(2, 8));
  }
}

TEST_CASE("p2p progress: callbacks that start messages nest only so deep") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  constexpr int kMessages = 1000;
  static thread_local int depth = 0;
  std::atomic<int> deepest{0};
  std::atomic<int> n_calls{0};
  Bytes nothing;
  std::vector<std::unique_ptr<Pending>> answers(kMessages);
  for (int i = 0; i < kMessages; ++i) {
    receive_and(a, i, &nothing, [&, i] {
      const int now = ++depth;
      int most = deepest;
      while (now > most && !deepest.compare_exchange_weak(most, now)) {
      }
      answers[static_cast<std::size_t>(i)] = a.send(1, i, Bytes(1));
      --depth;
      ++n_calls;
    });
  }
  std::vector<std::unique_ptr<Pending>> other_side;
  for (int i = 0; i < kMessages; ++i) {
    other_side.push_back(b.send(0, i, Bytes()));
    other_side.push_back(b.receive(0, i, 1));
  }
  a.engine().help_until([&] { return n_calls == kMessages; }, nullptr);
  for (const auto& pending : other_side) {
    REQUIRE_NOTHROW(pending->help(b.engine()));
  }
  for (const auto& pending : answers) {
    REQUIRE_NOTHROW(pending->help(a.engine()));
  }
  REQUIRE(deepest > 1);  // there was something to nest
  REQUIRE(deepest <= Nesting::kMost);
}

TEST_CASE("p2p progress: a callback deep inside others waits for one that was left") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  constexpr int kMessages = Nesting::kMost + 10;
  static thread_local int depth = 0;
  bool has_waited = false;
  // The background thread may have taken some of a round's callbacks, so that they are not as deep.
  for (int round = 0; round < 100 && !has_waited; ++round) {
    std::promise<void> last;
    std::atomic<int> n_calls{0};
    std::atomic<bool> is_deep{false};
    Bytes nothing;
    std::vector<std::unique_ptr<Pending>> answers(kMessages);
    for (int i = 0; i < kMessages; ++i) {
      receive_and(a, i, &nothing, [&, i] {
        const bool is_deepest = ++depth == Nesting::kMost && i < kMessages - 1;
        answers[static_cast<std::size_t>(i)] = a.send(1, i, Bytes());
        if (is_deepest && !is_deep.exchange(true)) {
          expect(a.engine().watch(), "nobody watches");
          wait_or_give_up(last);
        }
        --depth;
        if (i == kMessages - 1) {
          last.set_value();
        }
        ++n_calls;
      });
    }
    std::vector<std::unique_ptr<Pending>> other_side;
    for (int i = 0; i < kMessages; ++i) {
      other_side.push_back(b.send(0, i, Bytes()));
      other_side.push_back(b.receive(0, i, 0));
    }
    a.engine().help_until([&] { return n_calls == kMessages; }, nullptr);
    for (const auto& pending : other_side) {
      REQUIRE_NOTHROW(pending->help(b.engine()));
    }
    for (const auto& pending : answers) {
      REQUIRE_NOTHROW(pending->help(a.engine()));
    }
    has_waited = is_deep;
  }
  REQUIRE(has_waited);
}

TEST_CASE("p2p progress: a caller that waits carries out a callback that waits for another one") {
  LocalGroup group(2);
  Endpoint a(group, 0);
  Endpoint b(group, 1);
  std::vector<Bytes> received(2, Bytes(70000));
  std::promise<void> inside;
  std::promise<void> second;
  std::atomic<bool> is_over{false};
  receive_and(a, 1, &received[0], [&] {
    receive_and(a, 2, &received[1], [&] { second.set_value(); });
    expect(a.engine().watch(), "nobody watches");
    // Peers wake the background thread, instead of leaving all to the caller that waits.
    const auto& sleepers = group.segment(0)->words(0).doorbell_waiters;
    const Deadline deadline = patient();
    while (sleepers.load() == 0) {
      expect(!deadline.has_passed(), "the background thread waits for the caller");
      std::this_thread::yield();
    }
    inside.set_value();
    wait_or_give_up(second);
    is_over = true;
  });
  std::thread sender([&] {
    b.send(0, 1, message(1, 70000))->finish();
    wait_or_give_up(inside);
    b.send(0, 2, message(2, 70000))->finish();
  });
  a.engine().help_until([&] { return is_over.load(); }, nullptr);
  sender.join();
  REQUIRE(received[1] == message(2, 70000));
}
