#include "core/lane.h"

#include <atomic>
#include <future>
#include <numeric>

#include "catch.h"
#include "close_lane.h"
#include "core/nesting.h"
#include "in_child.h"
#include "no_threads.h"
#include "rank_threads.h"
#include "thread_activity.h"

using namespace horon;
using namespace horon::testing;

namespace {

// A task made of functions.
class TestTask final : public Task {
 public:
  explicit TestTask(std::function<void()> operation, std::function<void()> callback = nullptr)
      : operation_(std::move(operation)), callback_(std::move(callback)) {}

  void execute() noexcept override {
    if (operation_) {
      operation_();
    }
  }
  void fail(const std::string& reason) noexcept override { reason_ = reason; }
  void complete() noexcept override { is_done_ = true; }
  void call_back() noexcept override {
    if (callback_) {
      callback_();
    }
    was_called_back_.set_value();
  }

  bool is_done() const { return is_done_; }
  // Until after its callback. "" when it ran, else why it did not.
  std::string wait() {
    const auto deadline = patient().at();
    if (was_called_back_.get_future().wait_until(deadline) != std::future_status::ready) {
      std::cerr << "a task was never called back for; giving up\n";
      std::abort();
    }
    return reason_;
  }

 private:
  const std::function<void()> operation_;
  const std::function<void()> callback_;
  std::string reason_;
  std::atomic<bool> is_done_{false};
  std::promise<void> was_called_back_;
};

std::shared_ptr<TestTask> task(std::function<void()> operation,
                               std::function<void()> callback = nullptr) {
  return std::make_shared<TestTask>(std::move(operation), std::move(callback));
}

// A task that runs until it is let go.
struct Blocker {
  std::promise<void> started;
  std::promise<void> release;
  std::shared_ptr<TestTask> blocked = task([this] {
    started.set_value();
    release.get_future().wait();
  });
  void occupy(Lane& lane) {
    lane.submit(blocked);
    started.get_future().wait();
  }
};

}  // namespace

TEST_CASE("an idle lane runs a synchronous operation on its caller's thread") {
  const auto lane = std::make_shared<Lane>();
  for (int i = 0; i < 3; ++i) {
    std::thread::id ran_on;
    lane->run([&] { ran_on = std::this_thread::get_id(); });
    REQUIRE(ran_on == std::this_thread::get_id());
  }
  lane->submit(task(nullptr));
  close_now(*lane);
}

TEST_CASE("run throws what its operation throws, inline and queued, and the lane goes on") {
  const auto lane = std::make_shared<Lane>();
  REQUIRE_THROWS_AS(lane->run([] { throw MismatchError("inline"); }), MismatchError);
  Blocker blocker;
  blocker.occupy(*lane);
  std::thread releaser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    blocker.release.set_value();
  });
  REQUIRE_THROWS_AS(lane->run([] { throw MismatchError("queued"); }), MismatchError);
  releaser.join();
  int ran = 0;
  lane->run([&] { ++ran; });
  REQUIRE(ran == 1);
  close_now(*lane);
}

TEST_CASE("calls inside an operation, as of a signal handler, are errors and do not hang") {
  const auto lane = std::make_shared<Lane>();
  const auto pending = task([] {});
  lane->run([&] {
    const auto refused = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const GroupError&) {
        return false;  // the group would end
      } catch (const Error& error) {
        return contains(error.what(), "signal handler");
      }
      return false;
    };
    REQUIRE(refused([&] { lane->run([] {}); }));
    lane->submit(pending);
    REQUIRE(refused([&] { lane->help_until([] { return false; }); }));
    REQUIRE(lane->help_until([] { return true; }));
  });
  lane->run([] {});  // behind it
  REQUIRE(pending->is_done());
  close_now(*lane);
}

TEST_CASE("a lane that is closed inside its own operation ends with it") {
  for (const bool is_queued : {false, true}) {
    const auto lane = std::make_shared<Lane>();
    int interrupted = 0;
    const auto operation = [&] {
      lane->close(patient(), [&] { ++interrupted; });
      lane->close(patient(), [&] { ++interrupted; });
    };
    if (is_queued) {
      lane->submit(task(operation));
      lane->help_until([] { return false; });
    } else {
      const auto queued = task([] {});
      lane->run([&] {
        lane->submit(queued);
        operation();
      });
      REQUIRE(contains(queued->wait(), "destroyed or aborted"));
    }
    close_now(*lane);
    REQUIRE(interrupted >= 1);
    REQUIRE_THROWS_AS(lane->run([] {}), GroupError);
  }
}

TEST_CASE("without a thread to be had, whoever waits runs what is queued") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return;  // the sanitizers need the address space that is taken away below
#endif
  REQUIRE(in_child([] {
            if (!take_threads_away()) {
              return 1;
            }
            const auto lane = std::make_shared<Lane>();
            int ran = 0;
            std::vector<std::shared_ptr<TestTask>> tasks;
            for (int i = 0; i < 3; ++i) {
              tasks.push_back(task([&] { ++ran; }));
              lane->submit(tasks.back());
            }
            lane->hand_over();
            lane->run([&] { ran = ran == 3 ? 10 : 20; });
            lane->submit(task([&] { ++ran; }));
            close_now(*lane);
            return ran == 11 ? 0 : 2;
          }) == 0);
}

TEST_CASE("tasks run one at a time, each thread's in its order") {
  constexpr int kThreads = 4;
  constexpr int kTasks = 500;
  const auto lane = std::make_shared<Lane>();
  std::atomic<int> inside{0};
  std::vector<std::pair<int, int>> ran;  // only one task runs at a time
  const auto operation = [&](int thread, int i) {
    return [&, thread, i] {
      expect(inside.fetch_add(1) == 0, "two operations at once");
      ran.emplace_back(thread, i);
      inside.fetch_sub(1);
    };
  };
  require_no_errors(run_ranks(kThreads, [&](int thread) {
    for (int i = 0; i < kTasks; ++i) {
      if ((i + thread) % 3 == 0) {
        lane->run(operation(thread, i));
      } else {
        lane->submit(task(operation(thread, i)));
      }
    }
  }));
  close_now(*lane);
  REQUIRE(ran.size() == kThreads * kTasks);
  std::vector<int> next(kThreads, 0);
  for (const auto& [thread, i] : ran) {
    REQUIRE(next[static_cast<std::size_t>(thread)]++ == i);
  }
}

TEST_CASE("a synchronous operation waits behind asynchronous ones") {
  const auto lane = std::make_shared<Lane>();
  Blocker blocker;
  blocker.occupy(*lane);
  std::vector<int> order;
  lane->submit(task([&] { order.push_back(1); }));
  std::thread releaser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    blocker.release.set_value();
  });
  std::thread::id ran_on;
  lane->run([&] {
    order.push_back(2);
    ran_on = std::this_thread::get_id();
  });
  releaser.join();
  REQUIRE(order == std::vector<int>{1, 2});
  REQUIRE(ran_on != std::this_thread::get_id());
  close_now(*lane);
}

TEST_CASE("an asynchronous task waits for a synchronous operation that runs") {
  const auto lane = std::make_shared<Lane>();
  std::vector<int> order;
  const auto later = task([&] { order.push_back(2); });
  lane->run([&] {
    lane->submit(later);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    order.push_back(1);
  });
  REQUIRE(later->wait() == "");
  REQUIRE(order == std::vector<int>{1, 2});
  close_now(*lane);
}

TEST_CASE("a callback may run and submit") {
  const auto lane = std::make_shared<Lane>();
  std::vector<int> order;
  std::thread::id callback_thread;
  std::thread::id inner_thread;
  std::promise<void> queued;
  auto queued_seen = queued.get_future().share();
  const auto last = task([&] { order.push_back(4); });
  const auto first = task([&] { order.push_back(1); },
                          [&] {
                            callback_thread = std::this_thread::get_id();
                            queued_seen.wait();
                            lane->submit(last);
                            lane->run([&] {
                              order.push_back(5);
                              inner_thread = std::this_thread::get_id();
                            });
                            order.push_back(6);
                          });
  const auto second = task([&] { order.push_back(2); });
  const auto third = task([&] { order.push_back(3); });
  lane->submit(first);
  lane->submit(second);
  lane->submit(third);
  queued.set_value();
  REQUIRE(first->wait() == "");
  REQUIRE(inner_thread == callback_thread);
  REQUIRE(order == std::vector<int>{1, 2, 3, 4, 5, 6});
  REQUIRE(second->is_done());
  close_now(*lane);
}

TEST_CASE("a callback may run while another thread's synchronous operation runs") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> in_callback;
  std::promise<void> sync_started;
  std::atomic<bool> callback_ran{false};
  const auto first = task(nullptr, [&] {
    in_callback.set_value();
    sync_started.get_future().wait();
    lane->run([&] { callback_ran = true; });  // the lane is occupied by the other thread
  });
  lane->submit(first);
  in_callback.get_future().wait();
  std::thread other([&] {
    lane->run([&] {
      sync_started.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    });
  });
  REQUIRE(first->wait() == "");
  other.join();
  REQUIRE(callback_ran);
  close_now(*lane);
}

TEST_CASE("callbacks that run from many threads' tasks do not block each other") {
  const auto lane = std::make_shared<Lane>();
  std::atomic<int> n_ran{0};
  std::atomic<int> n_inner{0};
  constexpr int kEach = 200;
  require_no_errors(run_ranks(3, [&](int thread) {
    for (int i = 0; i < kEach; ++i) {
      if (thread == 0) {
        lane->run([&] { ++n_ran; });
      } else {
        lane->submit(task([&] { ++n_ran; },
                          [&, i] {
                            if (i % 2 == 0) {
                              lane->run([&] { ++n_inner; });
                            } else {
                              lane->submit(task([&] { ++n_inner; }));
                            }
                          }));
      }
    }
    lane->run([] {});
  }));
  while (n_inner != 2 * kEach) {
    std::this_thread::yield();
  }
  REQUIRE(n_ran == 3 * kEach);
  close_now(*lane);
}

TEST_CASE("callbacks that submit or run nest only so deep, and each is called once, in order") {
  const bool is_sync = GENERATE(false, true);
  const auto lane = std::make_shared<Lane>();
  constexpr int kTasks = 2000;
  Blocker blocker;
  blocker.occupy(*lane);
  int depth = 0;  // all of these only on the progress thread
  int deepest = 0;
  int n_inner = 0;
  std::vector<int> executed;
  std::vector<int> called_back;
  std::vector<std::shared_ptr<TestTask>> tasks;
  for (int i = 0; i < kTasks; ++i) {
    tasks.push_back(task([&, i] { executed.push_back(i); },
                         [&, i] {
                           deepest = std::max(deepest, ++depth);
                           called_back.push_back(i);
                           if (is_sync) {
                             lane->run([&] { ++n_inner; });
                           } else {
                             const auto inner = task([&] { ++n_inner; });
                             lane->submit(inner);
                             // Without a word to the lane: it is done by now.
                             expect(inner->is_done(), "the submitted task has not run");
                           }
                           --depth;
                         }));
    lane->submit(tasks.back());
  }
  blocker.release.set_value();
  for (const auto& one : tasks) {
    REQUIRE(one->wait() == "");
  }
  std::vector<int> all(kTasks);
  std::iota(all.begin(), all.end(), 0);
  REQUIRE(executed == all);
  REQUIRE(called_back == all);
  REQUIRE(n_inner == kTasks);
  REQUIRE(deepest == Nesting::kMost);
  close_now(*lane);
}

TEST_CASE("a callback deep inside others sees what is behind it end, whose callback is left") {
  const auto lane = std::make_shared<Lane>();
  constexpr int kTasks = Nesting::kMost + 10;
  Blocker blocker;
  blocker.occupy(*lane);
  bool was_called = false;
  const auto last = task(nullptr, [&] { was_called = true; });
  bool is_done = false;
  bool was_left = false;
  int depth = 0;
  std::vector<std::shared_ptr<TestTask>> tasks;
  for (int i = 0; i < kTasks; ++i) {
    tasks.push_back(task(nullptr, [&] {
      if (++depth == Nesting::kMost && !was_left) {
        lane->help_until([&] { return last->is_done(); });
        is_done = last->is_done();
        was_left = !was_called;
      } else {
        lane->run([] {});
      }
      --depth;
    }));
    lane->submit(tasks.back());
  }
  lane->submit(last);
  blocker.release.set_value();
  for (const auto& one : tasks) {
    REQUIRE(one->wait() == "");
  }
  REQUIRE(last->wait() == "");
  REQUIRE(is_done);
  REQUIRE(was_left);
  REQUIRE(was_called);
  close_now(*lane);
}

TEST_CASE("help_until works off the queue on the progress thread, and elsewhere returns at once") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> queued;
  auto queued_seen = queued.get_future().share();
  const auto second = task(nullptr);
  const auto third = task(nullptr);
  bool second_done = false;
  bool third_done = true;
  const auto first = task(nullptr, [&] {
    queued_seen.wait();
    lane->help_until([&] { return second->is_done(); });
    second_done = second->is_done();
    third_done = third->is_done();
  });
  lane->submit(first);
  lane->submit(second);
  lane->submit(third);
  queued.set_value();
  REQUIRE(first->wait() == "");
  REQUIRE(second_done);
  REQUIRE_FALSE(third_done);  // it stops as soon as it may
  lane->help_until([] { return false; });
  close_now(*lane);
  REQUIRE(third->is_done());
}

TEST_CASE("close lets the queue drain") {
  const auto lane = std::make_shared<Lane>();
  std::atomic<int> n_ran{0};
  std::vector<std::shared_ptr<TestTask>> tasks;
  for (int i = 0; i < 20; ++i) {
    tasks.push_back(task([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ++n_ran;
    }));
    lane->submit(tasks.back());
  }
  bool interrupted = false;
  lane->close(patient(), [&] { interrupted = true; });
  REQUIRE(n_ran == 20);
  REQUIRE_FALSE(interrupted);
  for (const auto& each : tasks) {
    REQUIRE(each->is_done());
    REQUIRE(each->wait() == "");
  }
}

TEST_CASE("close at its deadline interrupts what runs and fails the rest") {
  const auto lane = std::make_shared<Lane>();
  Blocker blocker;
  blocker.occupy(*lane);
  bool ran = false;
  const auto rest = task([&] { ran = true; });
  lane->submit(rest);
  std::exception_ptr sync_error;
  std::promise<void> sync_called;
  std::thread sync([&] {
    sync_called.set_value();
    sync_error = error_of([&] { lane->run([&] { ran = true; }); });
  });
  sync_called.get_future().wait();
  lane->close(soon(), [&] { blocker.release.set_value(); });
  sync.join();
  REQUIRE(blocker.blocked->wait() == "");
  REQUIRE(contains(rest->wait(), "destroyed or aborted"));
  REQUIRE(threw<GroupError>(sync_error));
  REQUIRE_FALSE(ran);
}

TEST_CASE("close waits for a synchronous operation on another thread") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> started;
  std::promise<void> interrupted;
  std::atomic<bool> has_ended{false};
  std::thread caller([&] {
    lane->run([&] {
      started.set_value();
      interrupted.get_future().wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      has_ended = true;
    });
  });
  started.get_future().wait();
  lane->close(soon(), [&] { interrupted.set_value(); });
  REQUIRE(has_ended);
  caller.join();
}

TEST_CASE("a closed lane takes nothing and closes again") {
  for (const bool has_thread : {false, true}) {
    const auto lane = std::make_shared<Lane>();
    if (has_thread) {
      const auto only = task(nullptr);
      lane->submit(only);
      REQUIRE(only->wait() == "");
    }
    close_now(*lane);
    close_now(*lane);
    REQUIRE_THROWS_AS(lane->run([] {}), GroupError);
    REQUIRE_THROWS_AS(lane->submit(task(nullptr)), GroupError);
  }
}

TEST_CASE("a callback may close the lane") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> queued;
  auto queued_seen = queued.get_future().share();
  const auto first = task(nullptr, [&] {
    queued_seen.wait();
    close_now(*lane);
  });
  const auto rest = task(nullptr);
  lane->submit(first);
  lane->submit(rest);
  queued.set_value();
  REQUIRE(first->wait() == "");
  REQUIRE(contains(rest->wait(), "destroyed or aborted"));
  close_now(*lane);  // joins
}

TEST_CASE("the last owner of a lane may go away in a callback") {
  auto lane = std::make_shared<Lane>();
  const std::weak_ptr<Lane> seen = lane;
  std::promise<void> given_up;
  auto given_up_seen = given_up.get_future().share();
  std::shared_ptr<Lane> last;
  const auto only = task(nullptr, [&] {
    given_up_seen.wait();
    close_now(*last);
    last.reset();
  });
  lane->submit(only);
  last = std::move(lane);
  given_up.set_value();
  REQUIRE(only->wait() == "");
  while (!seen.expired()) {
    std::this_thread::yield();
  }
}

TEST_CASE("a task is let go of with no lock held") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> destroyed;
  struct InDestructor {
    std::function<void()> action;
    ~InDestructor() { action(); }
  };
  {
    auto last_words = std::make_shared<InDestructor>();
    last_words->action = [&] {
      lane->help_until([] { return true; });  // takes the lane's lock
      destroyed.set_value();
    };
    lane->submit(task([last_words] {}));
  }
  if (destroyed.get_future().wait_until(patient().at()) != std::future_status::ready) {
    std::cerr << "the lane destroys tasks with its lock held; giving up\n";
    std::abort();
  }
  close_now(*lane);
}

TEST_CASE("the progress thread sleeps when there is nothing to do") {
  const auto lane = std::make_shared<Lane>();
  long thread_id = 0;
  const auto only = task([&] { thread_id = current_thread_id(); });
  lane->submit(only);
  REQUIRE(only->wait() == "");
  REQUIRE(comes_to_rest(thread_id));
  close_now(*lane);
}
