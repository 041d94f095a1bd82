// Operations of a meeting that are left to the others to be ended; see Note [Leaving] in
// named_engine.h. One rank, whose transport says when the others have done their parts.

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "catch.h"
#include "named_ranks.h"

using namespace horon;           // NOLINT
using namespace horon::testing;  // NOLINT

namespace {

class LeavingTransport final : public Transport {
 public:
  LeavingTransport(Segment* segment, const Peers* peers) : inner_(segment, peers) {}

  void run(const Request& request, const WaitContext& context) override {
    expect(!is_left_, "something was run before what was left had ended");
    inner_.run(request, context);
  }
  Leaving run_and_leave(const Request& request, const WaitContext& context) override {
    lead_bytes = request.lead_bytes;
    std::this_thread::sleep_for(takes);
    run(request, context);
    is_left_ = true;
    return {true, 0};
  }
  bool has_left_ended() override { return have_ended; }
  void await_left(const WaitContext& context) override {
    expect(is_left_, "waits for nothing");
    while (!have_ended) {
      if (fails) {
        is_left_ = false;
        throw PeerLostError("rank 1 died");
      }
      if (context.deadline.has_passed()) {
        throw TimeoutError("late");
      }
      std::this_thread::yield();
    }
    is_left_ = false;
  }
  void let_go_left() override {
    n_let_go += is_left_ ? 1 : 0;
    is_left_ = false;
  }
  void abort(const std::string& reason) override {
    fails = true;
    inner_.abort(reason);
  }
  void depart() override { inner_.depart(); }

  bool is_left() const { return is_left_; }

  std::atomic<bool> have_ended{false};
  std::atomic<bool> fails{false};
  std::atomic<int> n_let_go{0};
  std::atomic<std::uint32_t> lead_bytes{0};  // of the last one
  std::chrono::milliseconds takes{0};

 private:
  ShmTransport inner_;
  std::atomic<bool> is_left_{false};
};

class LeavingLane final : public ProcessSetLane {
 public:
  explicit LeavingLane(std::unique_ptr<SharedGroup> group)
      : group_(std::move(group)), transport_(&group_->segment, &group_->peers) {}
  LeavingTransport& transport() override { return transport_; }
  void shutdown() override { transport_.depart(); }
  void abort(const std::string& reason) override { transport_.abort(reason); }

 private:
  const std::unique_ptr<SharedGroup> group_;
  LeavingTransport transport_;
};

struct Alone {
  Alone() {
    NamedEngine::Parts parts;
    parts.channel = make_channel(ControlKind::kShm, store, 0, 1);
    parts.may_meet = true;
    parts.has_spare_cores = false;
    parts.make_lane = [this](int, const std::vector<int>&, const std::function<void()>&) {
      PrefixedStore own(&store, "set/");
      auto lane = std::make_unique<LeavingLane>(
          rendezvous(own, identity_of(0, 1), small_options(), patient()));
      transport = &lane->transport();
      return lane;
    };
    parts.make_buffer = [](std::size_t bytes) {
      return std::shared_ptr<std::byte>(new std::byte[bytes],
                                        [](const std::byte* data) { delete[] data; });
    };
    engine = std::make_unique<NamedEngine>(std::move(parts), NamedOptions{});
  }

  std::shared_ptr<FloatOperation> large(const std::string& name) {
    return named_all_reduce(name, std::vector<float>(std::size_t{1} << 19, 1.0F));  // 2 MiB
  }
  struct Left {
    std::shared_ptr<FloatOperation> operation;
    std::uint64_t handle;
  };
  // One that the others have not ended yet. On a busy machine the background thread may still be
  // at the engine from its start, and carries it out without leaving.
  Left leave(const std::string& name) {
    for (int i = 0; i < 1000; ++i) {
      const auto operation = large(name);
      const std::uint64_t handle = engine->submit(operation, true);
      engine->meet(handle, nullptr);
      if (transport->is_left()) {
        return {operation, handle};
      }
      engine->wait(handle, nullptr);
    }
    FAIL("nothing was left");
    return {};
  }

  MemoryStore store;
  LeavingTransport* transport = nullptr;
  std::unique_ptr<NamedEngine> engine;
};

}  // namespace

TEST_CASE(
    "leaving: an operation is done when the others have done their parts, for poll and wait") {
  Alone alone;
  for (const bool polls : {true, false}) {
    alone.transport->have_ended = false;
    const auto [operation, handle] = alone.leave("large");
    REQUIRE_FALSE(alone.engine->poll(handle));
    REQUIRE_FALSE(alone.engine->try_wait(handle));
    alone.transport->have_ended = true;
    while (polls && !alone.engine->poll(handle)) {  // the background thread may be at it just now
      std::this_thread::yield();
    }
    REQUIRE(alone.engine->wait(handle, nullptr) == operation);
    REQUIRE_FALSE(operation->error);
  }
}

TEST_CASE("leaving: a wait lasts until the others have done their parts") {
  Alone alone;
  const auto [operation, handle] = alone.leave("large");
  std::atomic<bool> is_over{false};
  std::thread waiter([&] {
    alone.engine->wait(handle, nullptr);
    is_over = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  REQUIRE_FALSE(is_over);
  alone.transport->have_ended = true;
  waiter.join();
  REQUIRE(is_over);
}

TEST_CASE("leaving: what comes next waits for what was left") {
  Alone alone;
  const std::uint64_t left = alone.leave("left").handle;
  const auto small = named_all_reduce("small", {1.0F});
  const std::uint64_t next = alone.engine->submit(small);  // for the background thread
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  REQUIRE(alone.transport->is_left());
  REQUIRE_FALSE(alone.engine->poll(next));
  alone.transport->have_ended = true;
  for (const std::uint64_t handle : {next, left}) {
    const auto operation = alone.engine->wait(handle, nullptr);
    REQUIRE(operation);
    REQUIRE_FALSE(operation->error);
  }
}

TEST_CASE("leaving: only what is promised to be waited for is left, and only at a meeting") {
  Alone alone;
  const auto waited = alone.large("waited for");
  alone.engine->wait(alone.engine->submit(waited, true), nullptr);  // or would not come back
  REQUIRE_FALSE(waited->error);
  for (const bool is_promised : {true, false}) {
    const auto operation = alone.large("large");
    operation->editable->postscale = is_promised ? 2 : 1;  // something to be done afterwards
    const std::uint64_t handle = alone.engine->submit(operation, is_promised);
    alone.engine->meet(handle, nullptr);
    REQUIRE_FALSE(alone.transport->is_left());
    alone.engine->wait(handle, nullptr);
    REQUIRE(operation->data.front() == (is_promised ? 2 : 1));
  }
}

TEST_CASE("leaving: a rank that dies before it has done its part fails everything") {
  Alone alone;
  const auto [operation, handle] = alone.leave("large");
  alone.transport->fails = true;
  REQUIRE(alone.engine->wait(handle, nullptr) == operation);
  REQUIRE(threw<GroupError>(operation->error));
  REQUIRE(contains(text_of(operation->error), "rank 1 died"));
  const auto later = alone.large("later");
  alone.engine->wait(alone.engine->submit(later), nullptr);
  REQUIRE(threw<GroupError>(later->error));
}

TEST_CASE("leaving: tensors are let go if the engine ends first") {
  for (const bool aborts : {true, false}) {
    Alone alone;
    const auto [operation, handle] = alone.leave("large");
    std::atomic<int>& n_let_go = alone.transport->n_let_go;
    if (aborts) {
      alone.engine->abort("enough");
      alone.engine->wait(handle, nullptr);
      REQUIRE(n_let_go == 1);
      REQUIRE(threw<GroupError>(operation->error));
    } else {
      alone.transport->have_ended = true;
      alone.engine->shutdown();
    }
  }
}

TEST_CASE("leaving: a shutdown does not wait long for a rank that has stopped in its part") {
  Alone alone;
  const auto [operation, handle] = alone.leave("large");
  const auto started = Clock::now();
  alone.engine->shutdown();
  REQUIRE(Clock::now() - started < std::chrono::seconds(30));
  alone.engine->wait(handle, nullptr);
  REQUIRE(threw<GroupError>(operation->error));
}

TEST_CASE("leaving: what has ended unnoticed does not fail with the engine") {
  Alone alone;
  const auto [operation, handle] = alone.leave("large");
  alone.transport->have_ended = true;
  alone.engine->abort("enough");
  REQUIRE(alone.engine->wait(handle, nullptr) == operation);
  REQUIRE_FALSE(operation->error);
}

TEST_CASE("leaving: what a reduction took is not taken for a wait for the others") {
  Alone alone;
  alone.transport->have_ended = true;
  alone.transport->takes = std::chrono::milliseconds(5);
  constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  std::uint32_t least_lead = kNone;
  for (int i = 0; i < 200 && least_lead > 0; ++i) {  // any of them may have been interrupted
    std::shared_ptr<const NamedRequest> request;     // by which leads are known
    bool was_left = true;
    for (int call = 0; call < 2; ++call) {
      const auto operation = alone.large(concat("large ", i));
      request = request ? request : operation->request;
      operation->request = request;
      alone.transport->lead_bytes = kNone;
      const std::uint64_t handle = alone.engine->submit(operation, true);
      const std::uint64_t with_it = alone.engine->submit(named_all_reduce("small", {1.0F}), true);
      alone.engine->meet(handle, nullptr);
      alone.engine->wait(handle, nullptr);
      alone.engine->wait(with_it, nullptr);
      was_left = was_left && alone.transport->lead_bytes != kNone;  // see leave()
    }
    if (was_left) {
      least_lead = std::min<std::uint32_t>(least_lead, alone.transport->lead_bytes);
    }
  }
  REQUIRE(least_lead == 0);
}

TEST_CASE("leaving: several threads poll, wait and submit") {
  Alone alone;
  alone.transport->have_ended = true;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&alone, t] {
      for (int i = 0; i < 200; ++i) {
        const auto operation = t % 2 == 0 ? alone.large(concat("large ", t))
                                          : named_all_reduce(concat("small ", t), {1.0F});
        const std::uint64_t handle = alone.engine->submit(operation, t % 2 == 0);
        if (t % 2 == 0) {
          alone.engine->meet(handle, nullptr);
        }
        if (i % 2 == 0) {
          for (int look = 0; look < 1000 && !alone.engine->poll(handle); ++look) {
            std::this_thread::yield();
          }
        }
        expect(alone.engine->wait(handle, nullptr) == operation, "another operation");
        expect(!operation->error, "failed");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}
