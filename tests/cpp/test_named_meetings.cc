// Ranks that meet for large named operations; see Note [Meetings] in named_engine.h.

#include <atomic>
#include <barrier>
#include <latch>
#include <thread>

#include "catch.h"
#include "named_ranks.h"

using namespace horon;           // NOLINT
using namespace horon::testing;  // NOLINT

namespace {

constexpr std::chrono::milliseconds kLong{60000};

std::shared_ptr<FloatOperation> large(const std::string& name, float value) {
  return named_all_reduce(name, std::vector<float>(std::size_t{1} << 19, value));  // 2 MiB
}

// Engines that meet, with a patience for each rank.
void run_meetings(const std::vector<std::chrono::milliseconds>& patience,
                  const std::function<void(NamedEngine&, int)>& body) {
  MemoryStore store;
  require_no_errors(run_ranks(static_cast<int>(patience.size()), [&](int rank) {
    NamedOptions options;
    options.meeting_patience = patience[static_cast<std::size_t>(rank)];
    const auto engine = make_engine(store, rank, static_cast<int>(patience.size()), options);
    body(*engine, rank);
    engine->shutdown();
  }));
}

}  // namespace

TEST_CASE("meetings: what ranks meet for is done before anybody waits") {
  for (const std::size_t n : {1U, 2U, 3U}) {
    run_meetings(std::vector(n, kLong), [n](NamedEngine& engine, int) {
      for (int round = 0; round < 20; ++round) {
        const auto operation = large("large", 2.0F);
        const std::uint64_t handle = engine.submit(operation, true);
        engine.meet(handle, nullptr);
        expect(engine.poll(handle), "not done after the meeting");
        engine.wait(handle, nullptr);
        const auto ranks = static_cast<float>(n);
        expect(operation->data.front() == 2 * ranks && operation->data.back() == 2 * ranks,
               "wrong sum");
      }
    });
  }
}

TEST_CASE("meetings: what is agreed on besides comes along") {
  for (const std::size_t n : {1U, 2U, 3U}) {
    run_meetings(std::vector(n, kLong), [](NamedEngine& engine, int) {
      for (int round = 0; round < 20; ++round) {
        // Another kind, which is not fused with it; and it comes last.
        const auto small = named_all_reduce("small", {1.0F});
        small->editable->priority = 1;
        const auto operation = std::make_shared<FloatOperation>(
            NamedKind::kAllGather, "large", std::vector<float>(std::size_t{1} << 19));
        const std::uint64_t with_it = engine.submit(small, true);
        const std::uint64_t handle = engine.submit(operation, true);
        engine.meet(handle, nullptr);
        expect(engine.poll(handle), "not done after the meeting");
        const bool came_along = engine.poll(with_it);
        engine.wait(with_it, nullptr);
        engine.wait(handle, nullptr);
        // On a busy machine a background thread may be at it, whose other work is not waited for.
        expect(came_along || operation->allocated_by != std::this_thread::get_id(), "left behind");
      }
    });
  }
}

TEST_CASE("meetings: a meeting to which somebody comes too late ends") {
  std::latch has_left(1);
  std::latch has_looked(1);
  run_meetings({std::chrono::milliseconds(5), kLong}, [&](NamedEngine& engine, int rank) {
    // Rank 0, which decides, comes first, and has gone when the other one comes.
    const auto operation = large("large", 1.0F);
    if (rank == 1) {
      has_left.wait();
    }
    const std::uint64_t handle = engine.submit(operation, true);
    const auto started = Clock::now();
    engine.meet(handle, nullptr);
    expect(Clock::now() - started < kLong / 2, "waited for a rank that had gone");
    expect(!engine.poll(handle), "done alone");
    if (rank == 0) {
      has_left.count_down();
      has_looked.wait();
    } else {
      has_looked.count_down();
    }
    engine.wait(handle, nullptr);
    expect(!operation->error && operation->data.front() == 2, "wrong sum");
  });
}

TEST_CASE("meetings: a meeting to which the coordinator comes too late ends") {
  std::latch has_left(1);
  std::latch has_met(1);
  run_meetings({kLong, std::chrono::milliseconds(5)}, [&](NamedEngine& engine, int rank) {
    const auto operation = large("large", 1.0F);
    if (rank == 0) {
      has_left.wait();
    }
    const std::uint64_t handle = engine.submit(operation, true);
    engine.meet(handle, nullptr);
    if (rank == 0) {
      // The other one, whose thread has gone on, takes part by its background thread.
      expect(engine.poll(handle), "not done after the meeting");
      has_met.count_down();
    } else {
      has_left.count_down();
      has_met.wait();
    }
    engine.wait(handle, nullptr);
    expect(!operation->error && operation->data.front() == 2, "wrong sum");
  });
}

namespace {

// Ranks that have given up meetings find each other again, since they try the same ones; `begin` is
// what they do before.
void must_find_each_other(const std::function<void(NamedEngine&, int)>& begin) {
  constexpr int kLate = 2 * WaitTrust::kMost;
  constexpr int kInTime = 4 * static_cast<int>(WaitTrust::kWaitsBetweenTrials);
  constexpr std::chrono::milliseconds kPatience{200};
  std::vector<std::unique_ptr<std::latch>> has_left;
  for (int i = 0; i < kLate; ++i) {
    has_left.push_back(std::make_unique<std::latch>(1));
  }
  std::barrier both_have_left(2);
  std::atomic<int> held_in_vain{0};
  run_meetings({kPatience, kPatience}, [&](NamedEngine& engine, int rank) {
    begin(engine, rank);
    const auto meet = [&](const std::function<void()>& before_wait) {
      const auto operation = large("large", 1.0F);
      const std::uint64_t handle = engine.submit(operation, true);
      engine.meet(handle, nullptr);
      const bool has_met = engine.poll(handle);
      before_wait();
      engine.wait(handle, nullptr);
      expect(operation->data.front() == 2, "wrong sum");
      return has_met;
    };
    // Rank 0 is late, until the other one holds no meetings any more; then both lose trust.
    for (int i = 0; i < kLate; ++i) {
      const auto started = Clock::now();
      if (rank == 0) {
        has_left[static_cast<std::size_t>(i)]->wait();
      }
      meet([&] {
        if (rank == 1) {
          held_in_vain += Clock::now() - started >= kPatience ? 1 : 0;
          has_left[static_cast<std::size_t>(i)]->count_down();
        }
      });
    }
    int n_met = 0;
    for (int i = 0; i < kInTime; ++i) {
      n_met += meet([&] { both_have_left.arrive_and_wait(); }) ? 1 : 0;
    }
    expect(n_met > kInTime / 4, "met ", n_met, " times of ", kInTime);
  });
  REQUIRE(held_in_vain.load() < kLate);
}

}  // namespace

TEST_CASE("meetings: ranks that give up meetings find each other again") {
  must_find_each_other([](NamedEngine&, int) {});
}

TEST_CASE("meetings: meetings are counted anew after a join") {
  must_find_each_other([](NamedEngine& engine, int rank) {
    if (rank == 1) {
      const auto alone = large("alone", 1.0F);
      const std::uint64_t handle = engine.submit(alone, true);
      engine.meet(handle, nullptr);
      engine.wait(handle, nullptr);  // rank 0 joins, and takes part with zeros
      expect(alone->data.front() == 1, "wrong sum");
    }
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kJoin, kJoinName));
  });
}

TEST_CASE("meetings: nobody meets for what is small, done or unknown") {
  run_meetings({kLong, kLong}, [](NamedEngine& engine, int rank) {
    const auto started = Clock::now();
    engine.meet(12345, nullptr);
    const auto operation = named_all_reduce("small", {1.0F});
    const std::uint64_t handle = engine.submit(operation, true);
    if (rank == 0) {
      engine.meet(handle, nullptr);  // the other one never does
    }
    engine.wait(handle, nullptr);
    const auto big = large("large", 1.0F);
    const std::uint64_t done = engine.submit(big, true);
    while (rank == 1 && !engine.poll(done)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (rank == 1) {
      engine.meet(done, nullptr);
    }
    engine.wait(done, nullptr);
    expect(Clock::now() - started < kLong / 2, "waited");
  });
}

TEST_CASE("meetings: an abort ends a meeting") {
  run_meetings({kLong, kLong}, [](NamedEngine& engine, int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the other one waits already
      engine.abort("enough");
      return;
    }
    const auto operation = large("large", 1.0F);
    const std::uint64_t handle = engine.submit(operation, true);
    engine.meet(handle, nullptr);
    engine.wait(handle, nullptr);
    expect(contains(error_text(*operation), "rank 1 aborted: enough"), error_text(*operation));
  });
}
