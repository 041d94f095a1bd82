// The lane's operations that are started by one and ended by another.

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <vector>

#include "catch.h"
#include "close_lane.h"
#include "core/lane.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

// An operation in two phases whose moments the test decides.
class SplitTask final : public Task {
 public:
  // Before the task is submitted:
  std::function<bool()> start;                   // none: it can always be started
  std::function<bool()> await;                   // none: waiting does not help
  std::function<bool()> come_together;           // none: the others are late
  std::function<void(bool is_started)> operate;  // in execute()
  std::function<void()> callback;                // in complete()

  bool try_start() noexcept override {
    ++start_calls;
    expect_unstarted();
    is_started = !start || start();
    return is_started;
  }
  bool await_start() noexcept override {
    expect_unstarted();
    return await && await();
  }
  bool meet() noexcept override {
    expect_unstarted();
    return come_together && come_together();
  }
  bool is_ready() noexcept override { return ready; }
  void execute() noexcept override {
    ran_on = std::this_thread::get_id();
    if (operate) {
      operate(is_started);
    }
  }
  void fail(const std::string& why) noexcept override { reason = why; }
  void complete() noexcept override {
    if (callback) {
      callback();
    }
    is_done = true;
    done_.set_value();
  }

  // "" when it ran, else why it did not.
  std::string wait() {
    if (finished_.wait_until(patient().at()) != std::future_status::ready) {
      std::cerr << "a task was never completed; giving up\n";
      std::abort();
    }
    return reason;
  }

  std::atomic<bool> ready{false};  // whether the others have come
  std::atomic<int> start_calls{0};
  std::atomic<bool> is_done{false};
  bool is_started = false;
  std::thread::id ran_on;
  std::string reason;

 private:
  void expect_unstarted() const {
    if (is_started || is_done) {
      std::cerr << "a task was started twice\n";
      std::abort();
    }
  }
  std::promise<void> done_;
  const std::shared_future<void> finished_ = done_.get_future().share();
};

std::shared_ptr<SplitTask> split_task() { return std::make_shared<SplitTask>(); }

// Tasks that write down their numbers when they run.
struct Sequence {
  std::vector<int> started;
  std::vector<int> ran;
  std::vector<std::shared_ptr<SplitTask>> tasks;

  std::shared_ptr<SplitTask> add() {
    const int number = static_cast<int>(tasks.size());
    const auto task = split_task();
    task->start = [this, number] {
      started.push_back(number);
      return true;
    };
    task->operate = [this, number](bool) { ran.push_back(number); };
    tasks.push_back(task);
    return task;
  }
};

bool wait_for(Lane& lane, SplitTask& task) {
  return lane.help_until([&] { return task.is_done.load(); });
}

}  // namespace

TEST_CASE("split phase: started in order by who issues, ended in order by who waits") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  for (int i = 0; i < 4; ++i) {
    lane->submit(sequence.add());
    REQUIRE(sequence.started.size() == static_cast<std::size_t>(i) + 1);
  }
  REQUIRE(sequence.ran.empty());
  REQUIRE(wait_for(*lane, *sequence.tasks[2]));
  REQUIRE(sequence.started == std::vector<int>{0, 1, 2, 3});
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2});  // not the last one: nobody asked for it
  for (int i = 0; i < 3; ++i) {
    REQUIRE(sequence.tasks[static_cast<std::size_t>(i)]->ran_on == std::this_thread::get_id());
  }
  REQUIRE(wait_for(*lane, *sequence.tasks[0]));  // again
  REQUIRE(wait_for(*lane, *sequence.tasks[3]));
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2, 3});
  close_now(*lane);
}

TEST_CASE("split phase: a synchronous operation ends what was started before it") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  lane->submit(sequence.add());
  lane->submit(sequence.add());
  std::thread::id ran_on;
  lane->run([&] {
    sequence.ran.push_back(100);
    ran_on = std::this_thread::get_id();
  });
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 100});
  REQUIRE(ran_on == std::this_thread::get_id());
  REQUIRE(sequence.tasks[1]->is_done);
  REQUIRE_THROWS_AS(lane->run([] { throw MismatchError("queued behind nothing"); }), MismatchError);
  lane->submit(sequence.add());
  REQUIRE_THROWS_AS(lane->run([] { throw MismatchError("queued"); }), MismatchError);
  REQUIRE(sequence.tasks[2]->is_done);
  close_now(*lane);
}

TEST_CASE("split phase: behind one that is not started nothing is started") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  lane->submit(sequence.add());
  std::promise<void> running;
  std::promise<void> go_on;
  const auto large = sequence.add();
  large->start = [] { return false; };
  large->operate = [&](bool is_started) {
    expect(!is_started, "was started after all");
    sequence.ran.push_back(1);
    running.set_value();
    go_on.get_future().wait();
  };
  lane->submit(large);
  running.get_future().wait();  // the progress thread has ended the first one and is on the second
  const auto small = sequence.add();
  const auto last = sequence.add();
  lane->submit(small);
  lane->submit(last);
  REQUIRE(small->start_calls == 0);
  REQUIRE(last->start_calls == 0);
  go_on.set_value();
  REQUIRE(last->wait() == "");
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2, 3});
  REQUIRE(small->start_calls == 0);
  REQUIRE(large->ran_on == last->ran_on);
  REQUIRE(large->ran_on != std::this_thread::get_id());
  // With the queue empty, it is started at once again.
  const auto next = sequence.add();
  lane->submit(next);
  REQUIRE(next->is_started);
  REQUIRE(wait_for(*lane, *next));
  REQUIRE(next->ran_on == std::this_thread::get_id());
  close_now(*lane);
}

TEST_CASE("split phase: what waits behind a synchronous operation is not started either") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  lane->run([&] {
    lane->submit(sequence.add());
    lane->submit(sequence.add());
    sequence.ran.push_back(100);
  });
  REQUIRE(sequence.tasks[1]->wait() == "");
  REQUIRE(sequence.started.empty());
  REQUIRE(sequence.ran == std::vector<int>{100, 0, 1});
  close_now(*lane);
}

TEST_CASE("split phase: who lacks room ends those that are ready, and no others") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  for (int i = 0; i < 4; ++i) {
    lane->submit(sequence.add());
  }
  for (int i = 0; i < 3; ++i) {
    sequence.tasks[static_cast<std::size_t>(i)]->ready = true;
  }
  const auto wants_room = sequence.add();
  wants_room->start = [&] {  // as if two had to be finished first
    sequence.started.push_back(4);
    return sequence.ran.size() >= 2;
  };
  lane->submit(wants_room);
  REQUIRE(wants_room->is_started);
  REQUIRE(sequence.ran == std::vector<int>{0, 1});
  REQUIRE(sequence.tasks[1]->ran_on == std::this_thread::get_id());
  REQUIRE(sequence.started == std::vector<int>{0, 1, 2, 3, 4, 4, 4});
  REQUIRE(wait_for(*lane, *wants_room));
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2, 3, 4});
  close_now(*lane);
}

TEST_CASE("split phase: a short wait for room, then the progress thread") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  const auto first = sequence.add();
  lane->submit(first);
  const auto lucky = sequence.add();
  int waits = 0;
  lucky->start = [&] { return first->is_done.load(); };
  lucky->await = [&] {
    first->ready = true;  // the other rank comes meanwhile
    ++waits;
    return true;
  };
  lane->submit(lucky);
  REQUIRE(lucky->is_started);
  REQUIRE(waits == 1);
  REQUIRE(first->ran_on == std::this_thread::get_id());
  const auto unlucky = sequence.add();
  unlucky->start = [] { return false; };
  unlucky->await = [&] {
    ++waits;
    return false;
  };
  lane->submit(unlucky);
  REQUIRE(waits == 2);
  REQUIRE(unlucky->wait() == "");
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2});
  REQUIRE(lucky->ran_on == unlucky->ran_on);
  REQUIRE(unlucky->ran_on != std::this_thread::get_id());
  close_now(*lane);
}

TEST_CASE("split phase: who lacks room leaves the turn to the progress thread") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  const auto first = sequence.add();
  first->ready = true;
  lane->submit(first);
  const auto wants_room = sequence.add();
  bool is_first_try = true;
  wants_room->start = [&] {
    if (is_first_try) {
      lane->hand_over();  // as another thread would, that asks for a future of the first one
      is_first_try = false;
    }
    return first->is_done.load();
  };
  int waits = 0;
  wants_room->await = [&] { return ++waits < 1000; };  // the others have come: it need not wait
  lane->submit(wants_room);
  REQUIRE(wants_room->wait() == "");
  REQUIRE(waits < 1000);
  REQUIRE(sequence.ran == std::vector<int>{0, 1});
  REQUIRE(first->ran_on != std::this_thread::get_id());
  close_now(*lane);
}

TEST_CASE("split phase: what meets the others is run by who issues it, all else by the thread") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  int meetings = 0;
  const auto add_large = [&](bool have_come) {
    const auto task = sequence.add();
    task->start = [] { return false; };
    task->come_together = [&meetings, have_come] {
      ++meetings;
      return have_come;
    };
    return task;
  };
  const auto first = sequence.add();
  first->ready = true;
  lane->submit(first);
  const auto met = add_large(true);
  lane->submit(met);  // behind one that can be ended
  REQUIRE(met->is_done);
  REQUIRE(met->ran_on == std::this_thread::get_id());
  REQUIRE(sequence.ran == std::vector<int>{0, 1});
  const auto alone = add_large(false);
  lane->submit(alone);
  REQUIRE(alone->wait() == "");
  REQUIRE(alone->ran_on != std::this_thread::get_id());
  REQUIRE(meetings == 2);
  lane->submit(sequence.add());  // which others have not come to yet
  const auto behind = add_large(true);
  lane->submit(behind);
  REQUIRE(behind->wait() == "");
  REQUIRE(behind->ran_on == alone->ran_on);
  REQUIRE(meetings == 2);
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2, 3, 4});
  close_now(*lane);
}

TEST_CASE("split phase: a lane that is closed during a meeting") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  const auto task = sequence.add();
  task->start = [] { return false; };
  std::promise<void> meeting;
  std::thread closer;
  task->come_together = [&] {
    closer = std::thread([&] {
      meeting.set_value();
      close_now(*lane);
    });
    meeting.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return true;
  };
  lane->submit(task);
  task->wait();  // run, or failed: as it came
  closer.join();
  REQUIRE(task->is_done);
  REQUIRE(sequence.ran.size() == (task->reason.empty() ? 1U : 0U));
}

TEST_CASE("split phase: hand_over lets the progress thread end what was started") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  lane->submit(sequence.add());
  lane->submit(sequence.add());
  lane->hand_over();
  REQUIRE(sequence.tasks[1]->wait() == "");
  REQUIRE(sequence.ran == std::vector<int>{0, 1});
  REQUIRE(sequence.tasks[1]->ran_on != std::this_thread::get_id());
  lane->hand_over();  // of nothing
  const auto own = sequence.add();
  lane->submit(own);
  REQUIRE(wait_for(*lane, *own));
  REQUIRE(own->ran_on == std::this_thread::get_id());  // only what was there was handed over
  close_now(*lane);
}

TEST_CASE("split phase: a waiter leaves to the progress thread what is its") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  std::promise<void> running;
  std::promise<void> go_on;
  const auto first = sequence.add();
  first->operate = [&](bool) {
    running.set_value();
    go_on.get_future().wait();
  };
  lane->submit(first);
  lane->submit(sequence.add());
  lane->hand_over();
  running.get_future().wait();
  REQUIRE_FALSE(wait_for(*lane, *sequence.tasks[1]));  // returns at once
  go_on.set_value();
  REQUIRE(sequence.tasks[1]->wait() == "");
  REQUIRE(sequence.tasks[1]->ran_on == first->ran_on);
  close_now(*lane);
}

TEST_CASE("split phase: poll ends what is ready, in order, and never waits") {
  const auto lane = std::make_shared<Lane>();
  lane->poll();  // nothing there
  Sequence sequence;
  for (int i = 0; i < 3; ++i) {
    lane->submit(sequence.add());
  }
  sequence.tasks[1]->ready = true;
  lane->poll();
  REQUIRE(sequence.ran.empty());  // the first one is not
  sequence.tasks[0]->ready = true;
  lane->poll();
  REQUIRE(sequence.ran == std::vector<int>{0, 1});
  REQUIRE(sequence.tasks[1]->is_done);
  REQUIRE(sequence.tasks[1]->ran_on == std::this_thread::get_id());
  sequence.tasks[2]->ready = true;
  lane->poll();
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2});
  lane->poll();
  close_now(*lane);
}

TEST_CASE("split phase: poll beside a running operation returns at once") {
  const auto lane = std::make_shared<Lane>();
  const auto ready = split_task();
  ready->ready = true;
  lane->run([&] {
    lane->submit(ready);
    lane->poll();
    expect(!ready->is_done, "ran inside another operation");
  });
  REQUIRE(ready->wait() == "");
  close_now(*lane);
}

TEST_CASE("split phase: what completes on a waiter's thread may run, submit and wait") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  std::vector<std::thread::id> threads;
  const auto first = sequence.add();
  const auto inner = split_task();
  inner->operate = [&](bool) { sequence.ran.push_back(50); };
  first->callback = [&] {
    lane->run([&] {
      sequence.ran.push_back(100);
      threads.push_back(std::this_thread::get_id());
    });
    lane->submit(inner);
    wait_for(*lane, *inner);
  };
  lane->submit(first);
  lane->submit(sequence.add());
  REQUIRE(wait_for(*lane, *first));
  REQUIRE(inner->is_done);
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 100, 50});
  REQUIRE(threads == std::vector<std::thread::id>{std::this_thread::get_id()});
  close_now(*lane);
}

TEST_CASE("split phase: close ends what was started") {
  const auto lane = std::make_shared<Lane>();
  Sequence sequence;
  for (int i = 0; i < 5; ++i) {
    lane->submit(sequence.add());
  }
  bool was_interrupted = false;
  lane->close(patient(), [&] { was_interrupted = true; });
  REQUIRE_FALSE(was_interrupted);
  REQUIRE(sequence.ran == std::vector<int>{0, 1, 2, 3, 4});
  for (const auto& task : sequence.tasks) {
    REQUIRE(task->is_done);
    REQUIRE(task->reason.empty());
  }
}

TEST_CASE("split phase: close at its deadline interrupts the one that waits and fails the rest") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> interrupted;
  const auto stuck = split_task();
  stuck->operate = [&](bool) { interrupted.get_future().wait(); };
  const auto rest = split_task();
  lane->submit(stuck);
  lane->submit(rest);
  lane->close(soon(), [&] { interrupted.set_value(); });
  REQUIRE(stuck->is_done);
  REQUIRE(stuck->reason.empty());  // it ran, and knows itself how that ended
  REQUIRE(contains(rest->wait(), "destroyed or aborted"));
  REQUIRE(rest->ran_on == std::thread::id());
  REQUIRE_FALSE(lane->help_until([] { return false; }));
}

TEST_CASE("split phase: close while a waiter is inside one waits until it is out") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> running;
  std::promise<void> interrupted;
  std::atomic<bool> is_out{false};
  const auto stuck = split_task();
  stuck->operate = [&](bool) {
    running.set_value();
    interrupted.get_future().wait();
    is_out = true;
  };
  lane->submit(stuck);
  std::thread waiter([&] { wait_for(*lane, *stuck); });
  running.get_future().wait();
  lane->close(soon(), [&] { interrupted.set_value(); });
  REQUIRE(is_out);
  waiter.join();
  REQUIRE(stuck->is_done);
}

TEST_CASE("split phase: close while one is being started") {
  const auto lane = std::make_shared<Lane>();
  std::promise<void> starting;
  std::promise<void> interrupted;
  const auto task = split_task();
  task->start = [&] {
    starting.set_value();
    interrupted.get_future().wait();
    return true;
  };
  std::thread issuer([&] { lane->submit(task); });
  starting.get_future().wait();
  lane->close(soon(), [&] { interrupted.set_value(); });
  issuer.join();
  REQUIRE(contains(task->wait(), "destroyed or aborted"));
  REQUIRE(task->ran_on == std::thread::id());
}

TEST_CASE("split phase: close fails nothing that is in the middle of its start or a meeting") {
  for (const bool is_met_for : {false, true}) {
    const auto lane = std::make_shared<Lane>();
    std::promise<void> running;
    std::promise<void> interrupted;
    const auto task = split_task();
    std::string reason;
    bool was_done = false;
    const auto stay = [&] {
      running.set_value();
      interrupted.get_future().wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      reason = task->reason;
      was_done = task->is_done;
      return true;
    };
    if (is_met_for) {
      task->start = [] { return false; };
      task->come_together = stay;
    } else {
      task->start = stay;
    }
    std::thread issuer([&] { lane->submit(task); });
    running.get_future().wait();
    lane->close(soon(), [&] { interrupted.set_value(); });
    issuer.join();
    REQUIRE(reason.empty());
    REQUIRE_FALSE(was_done);
    REQUIRE(contains(task->wait(), "destroyed or aborted"));
  }
}

TEST_CASE("split phase: many threads start, wait, poll, hand over and run") {
  constexpr int kThreads = 4;
  const int n_tasks = kHasThreadSanitizer ? 300 : 1500;
  const auto lane = std::make_shared<Lane>();
  // Guarded by the lane: one turn at a time.
  std::atomic<int> inside{0};
  std::vector<int> next_of_thread(kThreads, 0);
  int n_started = 0;
  std::atomic<int> n_completed{0};
  const auto in_turn = [&](const auto& act) {
    if (inside.fetch_add(1) != 0) {
      std::cerr << "two turns at once\n";
      std::abort();
    }
    act();
    inside.fetch_sub(1);
  };
  const auto next = [&](int thread, int i) {
    if (next_of_thread[static_cast<std::size_t>(thread)]++ != i) {
      std::cerr << "out of order\n";
      std::abort();
    }
  };
  require_no_errors(run_ranks(kThreads, [&](int thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    std::vector<std::shared_ptr<SplitTask>> own;
    for (int i = 0; i < n_tasks; ++i) {
      if (random() % 6 == 0) {
        lane->run([&] {
          in_turn([&] {
            expect(n_started == 0, "run() beside started operations");
            next(thread, i);
          });
        });
        ++n_completed;
        continue;
      }
      const auto task = split_task();
      const bool is_small = random() % 4 != 0;
      task->start = [&, is_small] {
        bool fits = false;
        in_turn([&] {
          fits = is_small && n_started < 8;
          n_started += fits ? 1 : 0;
        });
        return fits;
      };
      task->await = [&, is_small] {
        bool helps = false;
        in_turn([&] { helps = is_small && n_started >= 8; });
        return helps;
      };
      task->operate = [&, thread, i](bool is_started) {
        in_turn([&] {
          n_started -= is_started ? 1 : 0;
          if (!is_started && n_started != 0) {
            std::cerr << "an operation that was not started ran beside started ones\n";
            std::abort();
          }
          next(thread, i);
        });
      };
      task->callback = [&] { ++n_completed; };
      task->ready = random() % 2 == 0;
      lane->submit(task);
      task->ready = true;
      own.push_back(task);
      switch (random() % 8) {
        case 0:
          lane->poll();
          break;
        case 1:
          lane->hand_over();
          break;
        case 2: {
          SplitTask& any = *own[random() % own.size()];
          if (!wait_for(*lane, any)) {
            any.wait();
          }
          break;
        }
        default:
          break;
      }
    }
    lane->run([] {});
  }));
  close_now(*lane);
  REQUIRE(n_completed == kThreads * n_tasks);
  REQUIRE(n_started == 0);
}
