#include <atomic>
#include <latch>
#include <numeric>
#include <random>
#include <thread>

#include "catch.h"
#include "named_ranks.h"

using namespace horon;           // NOLINT
using namespace horon::testing;  // NOLINT

namespace {

// Each rank with an engine of its own; shut down at the end. Once with each kind of channel.
void run_engines(int n_ranks, const std::function<void(NamedEngine&, int)>& body,
                 const NamedOptions& options = {}) {
  for (const ControlKind control : {ControlKind::kShm, ControlKind::kTcp}) {
    INFO("over " << (control == ControlKind::kShm ? "shared memory" : "TCP"));
    MemoryStore store;
    require_no_errors(run_ranks(n_ranks, [&](int rank) {
      const auto engine = make_engine(store, rank, n_ranks, options, control);
      body(*engine, rank);
      engine->shutdown();
    }));
  }
}

}  // namespace

TEST_CASE("named engine: hundreds of names in another order on each rank") {
  for (const int n : {1, 2, 3}) {
    run_engines(n, [n](NamedEngine& engine, int rank) {
      for (int round = 0; round < 4; ++round) {
        constexpr int kNames = 200;
        std::vector<int> order(kNames);
        std::iota(order.begin(), order.end(), 0);
        std::mt19937 random(static_cast<unsigned>(100 * round + rank));
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::shared_ptr<FloatOperation>> operations(kNames);
        std::vector<std::uint64_t> handles(kNames);
        for (const int i : order) {
          const auto at = static_cast<std::size_t>(i);
          operations[at] =
              named_all_reduce(concat("t", i), std::vector<float>(at * 5 + 1, float(i)));
          handles[at] = engine.submit(operations[at]);
        }
        for (std::size_t i = 0; i < kNames; ++i) {
          engine.wait(handles[i], nullptr);
          expect(!operations[i]->error, error_text(*operations[i]));
          for (const float value : operations[i]->data) {
            expect(value == static_cast<float>(n) * static_cast<float>(i), "wrong sum");
          }
        }
      }
    });
  }
}

TEST_CASE("named engine: a mismatch fails one name on all ranks, and the next one works") {
  run_engines(3, [](NamedEngine& engine, int rank) {
    auto bad = named_all_reduce("bad", std::vector<float>(rank == 1 ? 2 : 3, 1.0F));
    complete(engine, bad);
    expect(
        contains(error_text(*bad), "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor "),
        error_text(*bad));
    expect(contains(error_text(*bad), "rank 1 sent a tensor of shape [2]"), error_text(*bad));
    auto good = named_all_reduce("bad", {1.0F});
    must_complete(engine, good);
    expect(good->data[0] == 3, "wrong sum");
  });
}

TEST_CASE("named engine: every kind of operation") {
  run_engines(3, [](NamedEngine& engine, int rank) {
    const auto r = static_cast<float>(rank);
    const auto n_own = static_cast<std::size_t>(rank);
    auto gather = std::make_shared<FloatOperation>(NamedKind::kAllGather, "gather",
                                                   std::vector<float>(n_own, r));
    must_complete(engine, gather);
    expect(gather->result == std::vector<float>{1, 2, 2}, "allgather");

    auto broadcast = std::make_shared<FloatOperation>(NamedKind::kBroadcast, "broadcast",
                                                      std::vector<float>{r, r});
    broadcast->editable->root = 2;
    must_complete(engine, broadcast);
    expect(broadcast->data == std::vector<float>{2, 2}, "broadcast");

    auto exchange = std::make_shared<FloatOperation>(NamedKind::kAllToAll, "alltoall",
                                                     std::vector<float>(3 + 3 * n_own, r));
    exchange->splits.assign(3, rank + 1);
    must_complete(engine, exchange);
    expect(exchange->result == std::vector<float>{0, 1, 1, 2, 2, 2}, "alltoall");
    expect(exchange->received_splits == std::vector<std::int64_t>{1, 2, 3}, "received splits");

    auto scatter = std::make_shared<FloatOperation>(NamedKind::kReduceScatter, "reducescatter",
                                                    std::vector<float>{1, 2, 3, 4});
    std::vector<float> part(static_cast<std::size_t>(rows_of(4, rank, 3)));
    scatter->tensors[0].output = {reinterpret_cast<std::byte*>(part.data()),
                                  part.size() * sizeof(float)};
    must_complete(engine, scatter);
    const std::vector<float> parts[] = {{3, 6}, {9}, {12}};
    expect(part == parts[rank], "reducescatter");

    auto average = std::make_shared<FloatOperation>(NamedKind::kAllReduce, "average",
                                                    std::vector<float>{r}, 0, NamedOp::kAverage);
    average->editable->postscale = 10;
    must_complete(engine, average);
    expect(average->data[0] == 10, "average");

    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "barrier"));
  });
}

TEST_CASE("named engine: Adasum of orthogonal and of equal vectors") {
  run_engines(4, [](NamedEngine& engine, int rank) {
    std::vector<float> unit(4, 0.0F);
    unit[static_cast<std::size_t>(rank)] = 1;
    auto orthogonal = std::make_shared<FloatOperation>(NamedKind::kAllReduce, "orthogonal", unit, 0,
                                                       NamedOp::kAdasum);
    must_complete(engine, orthogonal);
    expect(orthogonal->data == std::vector<float>{1, 1, 1, 1}, "orthogonal vectors are added");
    auto equal = std::make_shared<FloatOperation>(NamedKind::kAllReduce, "equal",
                                                  std::vector<float>{3, 4}, 0, NamedOp::kAdasum);
    must_complete(engine, equal);
    expect(equal->data == std::vector<float>{3, 4}, "equal vectors are averaged");
  });
}

TEST_CASE("named engine: process sets, overlapping") {
  run_engines(3, [](NamedEngine& engine, int rank) {
    const std::vector<std::vector<std::int32_t>> sets = {{0, 1}, {1, 2}};
    for (std::size_t i = 0; i < sets.size(); ++i) {
      auto add =
          std::make_shared<SignalOperation>(NamedKind::kAddProcessSet, concat("add", i), sets[i]);
      must_complete(engine, add);
      expect(add->value == static_cast<int>(i) + 1, "number of the process set");
    }
    std::vector<std::uint64_t> handles;
    for (int i = 0; i < 50; ++i) {
      const int set = 1 + (i + rank) % 2;  // another order on each rank
      if (rank == 1 || (rank == 0) == (set == 1)) {
        handles.push_back(engine.submit(named_all_reduce(concat("t", i, set), {1.0F}, set)));
      }
    }
    // Names of a set differ by parity between ranks, so fill up what is missing.
    for (int i = 0; i < 50; ++i) {
      const int set = 1 + (i + rank + 1) % 2;
      if (rank == 1 || (rank == 0) == (set == 1)) {
        handles.push_back(engine.submit(named_all_reduce(concat("t", i, set), {1.0F}, set)));
      }
    }
    for (const std::uint64_t handle : handles) {
      const auto done = engine.wait(handle, nullptr);
      expect(!done->error, error_text(*done));
      expect(static_cast<FloatOperation&>(*done).data[0] == 2, "wrong sum");
    }
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kRemoveProcessSet, "remove",
                                                            std::vector<std::int32_t>{}, 0, 1));
    expect(engine.process_sets() == std::vector<int>{0, 2}, "process sets");
  });
}

TEST_CASE("named engine: uneven data and join") {
  run_engines(3, [](NamedEngine& engine, int rank) {
    for (int i = 0; i < 3 * rank; ++i) {
      auto step = named_all_reduce(concat("u", i), {1.0F});
      must_complete(engine, step);
      const int n_joined = i / 3;
      expect(step->data[0] == static_cast<float>(2 - n_joined), "joined ranks count as zeros");
    }
    auto join = std::make_shared<SignalOperation>(NamedKind::kJoin, kJoinName);
    must_complete(engine, join);
    expect(join->value == 2, "the last to join");
  });
}

TEST_CASE("named engine: a name that is in flight can not be used again") {
  run_engines(2, [](NamedEngine& engine, int rank) {
    if (rank == 0) {
      auto first = engine.submit(named_all_reduce("x", {1.0F}));
      bool was_refused = false;
      try {
        engine.submit(named_all_reduce("x", {1.0F}));
      } catch (const UsageError& error) {
        was_refused = contains(error.what(), "same name");
      }
      expect(was_refused, "a duplicate was accepted");
      expect(!engine.poll(first), "done without the other rank");
      must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "b"));
      engine.wait(first, nullptr);
    } else {
      must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "b"));
      must_complete(engine, named_all_reduce("x", {1.0F}));
    }
  });
}

TEST_CASE("named engine: a rank that shuts down is named to those that need it") {
  const ControlKind control = GENERATE(ControlKind::kShm, ControlKind::kTcp);
  MemoryStore store;
  std::latch both_know(2);  // or who is late would hear that the first one has left, too
  require_no_errors(run_ranks(3, [&](int rank) {
    const auto engine = make_engine(store, rank, 3, {}, control);
    if (rank == 1) {
      engine->shutdown();
      return;
    }
    auto operation = named_all_reduce("x", {1.0F});
    complete(*engine, operation);
    both_know.arrive_and_wait();
    expect(contains(error_text(*operation), "rank 1 has shut down"), error_text(*operation));
  }));
}

TEST_CASE("named engine: an abort fails all ranks, with the reason, and later calls, too") {
  const ControlKind control = GENERATE(ControlKind::kShm, ControlKind::kTcp);
  MemoryStore store;
  require_no_errors(run_ranks(3, [&](int rank) {
    const auto engine = make_engine(store, rank, 3, {}, control);
    if (rank == 2) {
      engine->abort("enough");
    }
    for (int i = 0; i < 2; ++i) {
      auto operation = named_all_reduce("x", {1.0F});
      complete(*engine, operation);
      expect(contains(error_text(*operation), "rank 2 aborted: enough"), error_text(*operation));
    }
    expect(!engine->is_running(), "it goes on after an abort");
  }));
}

TEST_CASE("named engine: a rank that fails while a process set is made keeps nobody waiting") {
  for (const ControlKind control : {ControlKind::kShm, ControlKind::kTcp}) {
    MemoryStore store;
    const auto before_lane = [](int rank) {
      return [rank](int set, const std::function<void()>& look_around) {
        if (set == 0) {
          return;
        }
        if (rank == 2) {
          throw Error("no memory left");
        }
        const Deadline deadline = patient();
        while (!deadline.has_passed()) {  // for the third, who never comes
          look_around();
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
      };
    };
    require_no_errors(run_ranks(4, [&](int rank) {
      const auto engine = make_engine(store, rank, 4, {}, control, nullptr, before_lane(rank));
      auto add =
          std::make_shared<FloatOperation>(NamedKind::kAddProcessSet, "add", std::vector<float>{});
      add->editable->ranks = {0, 1, 2};
      complete(*engine, add);
      if (rank < 3) {
        expect(contains(error_text(*add), "no memory left"), error_text(*add));
      }
      engine->shutdown();
    }));
  }
}

TEST_CASE(
    "named engine: calls of a signal handler inside a wait are errors, and shutdown ends it") {
  for (const ControlKind control : {ControlKind::kShm, ControlKind::kTcp}) {
    MemoryStore store;
    require_no_errors(run_ranks(2, [&](int rank) {
      const auto engine = make_engine(store, rank, 2, {}, control);
      if (rank == 1) {
        auto never = named_all_reduce("of rank 1", {1.0F});
        complete(*engine, never);
        expect(contains(error_text(*never), "rank 0 aborted"), error_text(*never));
        engine->shutdown();
        return;
      }
      const auto handle = engine->submit(named_all_reduce("of rank 0", {1.0F}));
      int calls = 0;
      const std::function<void()> handler = [&] {
        if (++calls > 1) {
          return;
        }
        const auto inner = engine->submit(named_all_reduce("of the handler", {1.0F}));
        const auto error = error_of([&] { engine->wait(inner, nullptr); });
        expect(threw<GroupError>(error), "no error inside a wait");
        expect(contains(text_of(error), "signal handler"), text_of(error));
        engine->abort("twice is no harm");
        engine->shutdown();
      };
      const auto operation = engine->wait(handle, &handler);
      expect(operation->error != nullptr, "no error after the handler's shutdown");
      engine->shutdown();
      expect(!engine->is_running(), "still running");
    }));
  }
}

TEST_CASE("named engine: a stall can be an error that names the missing rank") {
  NamedOptions options;
  options.stall_shutdown = std::chrono::seconds(1);
  std::atomic<bool> has_failed{false};
  run_engines(
      2,
      [&](NamedEngine& engine, int rank) {
        if (rank == 0) {
          has_failed.wait(false);  // a barrier that began now would be given up, too
          has_failed = false;      // for the next run
        } else {
          auto late = named_all_reduce("late", {1.0F});
          complete(engine, late);
          expect(contains(error_text(*late), "rank 1 announced it, rank 0 did not"),
                 error_text(*late));
          has_failed = true;
          has_failed.notify_all();
        }
        must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "b"));
      },
      options);
}

TEST_CASE("named engine: who waits looks around, however much goes on meanwhile") {
  MemoryStore store;
  std::atomic<bool> was_interrupted{false};
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto engine =
        make_engine(store, rank, 2, {}, rank == 0 ? ControlKind::kRestless : ControlKind::kShm);
    const std::uint64_t handle = engine->submit(named_all_reduce(concat("of rank ", rank), {1.0F}));
    const std::function<void()> interrupt = [] { throw std::runtime_error("Ctrl-C"); };
    if (rank == 0) {
      try {
        engine->wait(handle, &interrupt);
      } catch (const std::runtime_error&) {
        was_interrupted = true;
      }
      expect(was_interrupted, "nothing was looked for");
    } else {
      for (int i = 0; i < 1000 && !was_interrupted; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    const std::uint64_t other =
        engine->submit(named_all_reduce(concat("of rank ", 1 - rank), {1.0F}));
    for (const std::uint64_t own : {handle, other}) {
      const auto done = engine->wait(own, nullptr);
      expect(done != nullptr && !done->error, "it can not be waited for again");
    }
    engine->shutdown();
  }));
}

TEST_CASE("named engine: again and again") {
  for (int i = 0; i < 20; ++i) {
    run_engines(2, [](NamedEngine&, int) {});
  }
}

TEST_CASE("named engine: a burst that nobody waits for is carried out all the same") {
  run_engines(2, [](NamedEngine& engine, int /*rank*/) {
    for (int round = 0; round < 3; ++round) {
      constexpr int kBurst = 50;
      std::vector<std::uint64_t> handles;
      handles.reserve(kBurst);
      for (int i = 0; i < kBurst; ++i) {
        handles.push_back(engine.submit(named_all_reduce(concat("t", i), {1.0F})));
      }
      // Only looked at: the background thread has to do it.
      const Deadline deadline = patient();
      for (const std::uint64_t handle : handles) {
        while (!engine.poll(handle)) {
          expect(!deadline.has_passed(), "it was never carried out");
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
      for (const std::uint64_t handle : handles) {
        expect(engine.wait(handle, nullptr) != nullptr, "the handle is gone");
        expect(engine.wait(handle, nullptr) == nullptr, "the handle is still there");
      }
    }
  });
}

TEST_CASE("named engine: a caller that broke its promise to wait keeps nobody") {
  run_engines(2, [](NamedEngine& engine, int /*rank*/) {
    must_complete(engine, named_all_reduce("first", {1.0F}));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the background thread sleeps
    const std::uint64_t abandoned = engine.submit(named_all_reduce("a", {1.0F}), true);
    const std::uint64_t handle = engine.submit(named_all_reduce("b", {1.0F}));
    const Deadline deadline = patient();
    while (!engine.poll(handle) || !engine.poll(abandoned)) {
      expect(!deadline.has_passed(), "it was never carried out");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

TEST_CASE("named engine: a promise that is put off keeps nobody waiting for ever") {
  // One rank waits at once; the others have submitted too, and do something else until it is done.
  const int waiting = GENERATE(0, 1, 2);
  const bool is_late = GENERATE(false, true);
  std::atomic<bool> has_come{false};
  run_engines(3, [&](NamedEngine& engine, int rank) {
    must_complete(engine, named_all_reduce("first", {1.0F}));
    if (rank != waiting && is_late) {
      std::this_thread::sleep_for(std::chrono::milliseconds(700));  // has been asked already
    }
    const auto gradient = named_all_reduce("gradient", {1.0F, 2.0F});
    const std::uint64_t handle = engine.submit(gradient, true);
    const Deadline deadline = patient();
    while (rank != waiting && !has_come) {
      expect(!deadline.has_passed(), "nobody carried it out for the rank that waits");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    engine.wait(handle, nullptr);
    has_come = true;
    expect(!gradient->error, error_text(*gradient));
    expect(gradient->data == std::vector<float>{3.0F, 6.0F}, "wrong sum");
  });
}

TEST_CASE("named engine: threads that submit and wait at once") {
  run_engines(2, [](NamedEngine& engine, int /*rank*/) {
    constexpr int kThreads = 3;
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    std::atomic<int> wrong{0};
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&engine, &wrong, thread] {
        for (int i = 0; i < 100; ++i) {
          const auto step = named_all_reduce(concat("thread", thread), {1.0F});
          const auto done = engine.wait(engine.submit(step, thread != 0), nullptr);
          wrong += done == nullptr || done->error || step->data[0] != 2;
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    expect(wrong == 0, "wrong sums");
  });
}
