// Tensors that are reduced while they are made: see Note [Made in parts] in part_maker.h.

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "catch.h"
#include "named_ranks.h"

using namespace horon;           // NOLINT
using namespace horon::testing;  // NOLINT
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kCount = (std::size_t{2} << 20) / sizeof(float) + 12'345;  // no whole parts

float value_of(int rank, std::size_t i) { return static_cast<float>(rank + 1) * (i % 1024); }

float sum_of(int n_ranks, std::size_t i) {
  float sum = 0;
  for (int rank = 0; rank < n_ranks; ++rank) {
    sum += value_of(rank, i);
  }
  return sum;
}

// An operation whose values are made when they are asked for, rows of 1,000 at a time.
std::shared_ptr<FloatOperation> made_later(const std::string& name, int rank) {
  auto operation = named_all_reduce(name, std::vector<float>(kCount, -1.0F));
  float* const data = operation->data.data();
  operation->maker =
      std::make_shared<PartMaker>(kCount * sizeof(float), [=](std::size_t begin, std::size_t end) {
        const std::size_t first = begin / sizeof(float);
        const std::size_t last = std::min(kCount, (end / sizeof(float) + 999) / 1000 * 1000);
        for (std::size_t i = first; i < last; ++i) {
          data[i] = value_of(rank, i);
        }
        return last * sizeof(float);
      });
  return operation;
}

std::shared_ptr<FloatOperation> made_already(const std::string& name, int rank) {
  auto operation = made_later(name, rank);
  operation->maker->finish();
  operation->maker.reset();
  return operation;
}

// As whoever makes a tensor does it.
void meet_and_finish(NamedEngine& engine, const std::shared_ptr<FloatOperation>& operation) {
  const std::uint64_t handle = engine.submit(operation, true);
  engine.meet(handle, nullptr);
  if (operation->maker) {
    operation->maker->finish();
  }
  engine.wait(handle, nullptr);
}

void expect_sum(const FloatOperation& operation, int n_ranks) {
  expect(!operation.error, error_text(operation));
  for (std::size_t i = 0; i < kCount; ++i) {
    if (operation.data[i] != sum_of(n_ranks, i)) {
      expect(false, "element ", i, ": ", operation.data[i], " instead of ", sum_of(n_ranks, i));
    }
  }
}

}  // namespace

TEST_CASE("parts: what is lacking is made once, in order, up to where it is asked for") {
  std::vector<std::pair<std::size_t, std::size_t>> calls;
  PartMaker maker(100, [&](std::size_t begin, std::size_t end) {
    calls.emplace_back(begin, end);
    return std::min<std::size_t>((end + 29) / 30 * 30, 100);
  });
  REQUIRE(maker.is_mine());
  maker.make_until(10);
  maker.make_until(30);
  REQUIRE(maker.has_more());
  maker.make_until(31);
  maker.finish();
  REQUIRE_FALSE(maker.has_more());
  maker.finish();
  maker.make_until(1000);
  REQUIRE(calls == std::vector<std::pair<std::size_t, std::size_t>>{{0, 10}, {30, 31}, {60, 100}});
}

TEST_CASE("parts: what a tensor is made from is let go when it is made") {
  const auto source = std::make_shared<int>(1);
  PartMaker maker(10, [source](std::size_t, std::size_t end) { return end; });
  maker.make_until(10);
  REQUIRE(source.use_count() == 2);
  maker.finish();
  REQUIRE(source.use_count() == 1);
  maker.make_until(20);
}

TEST_CASE("parts: other threads wait until all is made, or until it has failed") {
  for (const bool fails : {false, true}) {
    PartMaker maker(10, [&](std::size_t, std::size_t end) {
      if (fails) {
        throw std::runtime_error("no memory");
      }
      return end;
    });
    std::atomic<bool> has_waited{false};
    std::thread other([&] {
      const bool is_mine = maker.is_mine();
      maker.await_made(patient_context());
      has_waited = !is_mine;
    });
    if (fails) {
      REQUIRE_THROWS_AS(maker.finish(), std::runtime_error);
    } else {
      maker.finish();
    }
    other.join();
    REQUIRE(has_waited);
  }
}

TEST_CASE("parts: a wait for what another thread makes can be interrupted") {
  PartMaker maker(10, [](std::size_t, std::size_t end) { return end; });
  const std::function<void()> interrupt = [] { throw std::runtime_error("Ctrl-C"); };
  auto waits =
      std::async(std::launch::async, [&] { maker.await_made({Deadline::after(10s), &interrupt}); });
  REQUIRE_THROWS_AS(waits.get(), std::runtime_error);
}

TEST_CASE("parts: ranks try both ways, and do what took all of them together less") {
  struct Case {
    std::chrono::nanoseconds whole[2];
    std::chrono::nanoseconds parts[2];
    bool prefers_parts;
  };
  for (const Case& one :
       {Case{{100us, 100us}, {90us, 90us}, true}, Case{{100us, 100us}, {110us, 70us}, true},
        Case{{100us, 100us}, {110us, 89us}, false},  // not worth it
        Case{{100us, 100us}, {150us, 90us}, false}}) {
    PartsTrial trials[2];
    int n_parts = 0;
    for (int time = 0; time < 1024 + 16; ++time) {
      const bool in_parts = trials[0].wants_parts();
      REQUIRE(in_parts == trials[1].wants_parts());
      if (time < 16 || time >= 1024) {
        REQUIRE(in_parts == (time % 2 == 1));
      } else {
        REQUIRE(in_parts == one.prefers_parts);
      }
      n_parts += in_parts ? 1 : 0;
      const std::vector<PartsTrial::Told> everyones{trials[0].tell(), trials[1].tell()};
      for (int rank = 0; rank < 2; ++rank) {
        trials[rank].hear(everyones);
        trials[rank].took(in_parts, in_parts ? one.parts[rank] : one.whole[rank]);
      }
    }
    REQUIRE(n_parts == (one.prefers_parts ? 16 + 1008 : 16));
  }
}

TEST_CASE("parts: a rank that does not know leaves it, and one that has forgotten catches up") {
  PartsTrial knows;
  for (int time = 0; time < 20; ++time) {
    knows.hear({knows.tell(), PartsTrial::Told{}});  // the other one never makes anything
    knows.took(time % 2 == 1, time % 2 == 1 ? 1us : 100us);
  }
  REQUIRE_FALSE(knows.wants_parts());
  PartsTrial forgot;
  REQUIRE(forgot.tell().times == 0);
  forgot.hear({knows.tell(), forgot.tell()});
  REQUIRE(forgot.tell().times == 21);
  REQUIRE_FALSE(forgot.wants_parts());  // no trial that the others do not take part in
}

TEST_CASE("parts: sums, whoever makes a tensor in parts") {
  const int n_ranks = GENERATE(1, 2, 3);
  MemoryStore store;
  require_no_errors(run_ranks(n_ranks, [&](int rank) {
    const auto engine = make_engine(store, rank, n_ranks);
    for (int round = 0; round < 8; ++round) {
      const std::string name = concat("tensor", round % 2);
      const bool makes = round < 4 || rank == round % n_ranks;
      const auto operation = makes ? made_later(name, rank) : made_already(name, rank);
      if (round == 3 && rank == 0) {
        std::this_thread::sleep_for(20ms);  // nobody meets
      }
      meet_and_finish(*engine, operation);
      expect_sum(*operation, n_ranks);
    }
    engine->shutdown();
  }));
}

TEST_CASE("parts: operations that others carry out, or that travel together, are made first") {
  const int n_ranks = GENERATE(1, 2);
  MemoryStore store;
  require_no_errors(run_ranks(n_ranks, [&](int rank) {
    NamedOptions options;
    options.fusion.alone_bytes = options.fusion.threshold_bytes;
    const auto engine = make_engine(store, rank, n_ranks, options);
    for (int round = 0; round < 4; ++round) {
      // Submitted, made a little later, and waited for by another thread.
      const auto first = made_later(concat("first", round), rank);
      const std::uint64_t handle = engine->submit(first, false);
      std::thread other([&] { engine->wait(handle, nullptr); });
      std::this_thread::sleep_for(2ms);
      first->maker->finish();
      other.join();
      expect_sum(*first, n_ranks);
      // Two that are agreed on at once, while the second is being made.
      const auto second = made_later(concat("second", round), rank);
      const auto third = made_later(concat("third", round), rank);
      const std::uint64_t second_handle = engine->submit(second, true);
      second->maker->finish();
      meet_and_finish(*engine, third);
      engine->wait(second_handle, nullptr);
      expect_sum(*second, n_ranks);
      expect_sum(*third, n_ranks);
    }
    engine->shutdown();
  }));
}

TEST_CASE("parts: a rank that has joined takes part with zeros") {
  MemoryStore store;
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto engine = make_engine(store, rank, 2);
    if (rank == 0) {
      const auto operation = made_later("tensor", 0);
      meet_and_finish(*engine, operation);
      expect(!operation->error, error_text(*operation));
      for (std::size_t i = 0; i < kCount; ++i) {
        expect(operation->data[i] == value_of(0, i), "element ", i);
      }
    }
    complete(*engine, std::make_shared<SignalOperation>(NamedKind::kJoin, kJoinName));
    engine->shutdown();
  }));
}

TEST_CASE("parts: what can not be made ends the group, and is told to whoever makes it") {
  MemoryStore store;
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto engine = make_engine(store, rank, 2);
    auto operation = made_already("tensor", rank);
    if (rank == 1) {
      operation->maker = std::make_shared<PartMaker>(
          kCount * sizeof(float), [](std::size_t /*begin*/, std::size_t end) -> std::size_t {
            if (end > (std::size_t{1} << 20)) {
              throw std::runtime_error("no memory");
            }
            return end;
          });
    }
    const std::uint64_t handle = engine->submit(operation, true);
    engine->meet(handle, nullptr);
    if (operation->maker) {
      bool has_thrown = false;
      try {
        operation->maker->finish();
      } catch (const std::runtime_error&) {
        has_thrown = true;
      }
      expect(has_thrown, "finish() knows of no error");
    }
    engine->wait(handle, nullptr);
    // Met: the group is over. Not met: reduced as far as it was made.
    if (operation->error) {
      const std::string text = error_text(*operation);
      expect(text.find("no memory") != std::string::npos, text);
    }
    engine->shutdown();
  }));
}
