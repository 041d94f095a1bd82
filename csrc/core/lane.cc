#include "core/lane.h"

#include <exception>
#include <optional>
#include <system_error>

#include "core/error.h"
#include "core/nesting.h"
#include "core/thread_name.h"

namespace horon {
namespace {

// A synchronous operation that had to queue: its caller waits until the progress thread has run it.
class InlineTask final : public Task {
 public:
  explicit InlineTask(FunctionRef<void()> operation) : operation_(operation) {}

  void execute() noexcept override {
    try {
      operation_();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  void fail(const std::string& reason) noexcept override {
    error_ = std::make_exception_ptr(GroupError(reason));
  }
  void complete() noexcept override {
    const std::lock_guard lock(mutex_);
    done_ = true;
    finished_.notify_all();
  }

  bool has_waiting_caller() const override { return true; }

  bool is_done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  // False when the time is over.
  bool wait_for(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return finished_.wait_for(lock, time, [&] { return done_; });
  }

  void wait_and_rethrow() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done_; });
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  const FunctionRef<void()> operation_;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;  // guarded by mutex_
};

// How long issuing an asynchronous operation may wait for others to make room, before it is left to
// the progress thread: a burst of small operations is faster without a thread, but a rank that
// waits for something else entirely must not be waited for.
constexpr std::chrono::milliseconds kStartPatience{10};

// How often somebody who waits for a turn looks for signals.
constexpr std::chrono::milliseconds kTurnLookAround{50};

constexpr const char* kClosedText =
    "the process group was destroyed or aborted; it can not run operations any more";
constexpr const char* kInsideText =
    "called in the middle of another operation of this group, on the same thread, by a signal "
    "handler: it would wait for itself. Set a flag in the handler, and act on it later";

}  // namespace

Lane::~Lane() {
  if (progress_.joinable()) {
    // A forked child, where the thread does not exist, or the thread itself, at its end, or a lane
    // that was closed inside one of its operations.
    progress_.detach();
  }
}

void Lane::check_open() const {
  if (is_closed_) {
    throw GroupError(kClosedText);
  }
}

std::uint64_t Lane::push(std::shared_ptr<Task> task) {
  queue_.push_back({std::move(task), false});
  return popped_ + queue_.size() - 1;
}

void Lane::begin_turn() {
  is_running_ = true;
  turn_holder_ = std::this_thread::get_id();
}

void Lane::end_turn() {
  is_running_ = false;
  turn_ended_.notify_all();
  if (is_claimed() && !queue_.empty()) {
    work_arrived_.notify_one();
  }
}

void Lane::run(FunctionRef<void()> operation, const std::function<void()>* check_interrupt,
               const std::function<void()>& give_up) {
  std::unique_lock lock(mutex_);
  check_open();
  if (queue_.empty() && !is_running_) {
    begin_turn();
    is_running_inline_ = !on_progress_thread();
    lock.unlock();
    struct EndTurn {
      Lane* lane;
      ~EndTurn() {
        const std::lock_guard lock(lane->mutex_);
        lane->is_running_inline_ = false;
        lane->end_turn();
      }
    } end_turn{this};
    operation();
    return;
  }
  if (is_inside_turn()) {
    throw Error(kInsideText);
  }
  const auto task = std::make_shared<InlineTask>(operation);
  push(task);
  lock.unlock();
  help_until([&] { return task->is_done(); });
  while (check_interrupt != nullptr && !task->wait_for(kTurnLookAround)) {
    try {
      (*check_interrupt)();
    } catch (...) {
      give_up();
      while (!task->wait_for(kTurnLookAround)) {  // it refers to this frame
      }
      throw;
    }
  }
  task->wait_and_rethrow();
}

void Lane::submit(std::shared_ptr<Task> task) {
  std::unique_lock lock(mutex_);
  check_open();
  const std::uint64_t ticket = push(std::move(task));
  if (on_progress_thread()) {
    // A callback issued it, and may go on to wait in a way that does not come by here (the wait
    // of a Future): nobody but this thread would ever run it.
    while (popped_ <= ticket) {
      run_next(lock);
    }
    return;
  }
  if (!start(ticket, lock) && !run_if_met(ticket, lock)) {
    claim();
  }
}

bool Lane::may_end_first() const {
  return !is_running_ && !is_claimed() && !queue_.empty() && queue_.front().is_started &&
         queue_.front().task->is_ready();
}

template <typename Act>
bool Lane::in_turn(std::uint64_t ticket, std::unique_lock<std::mutex>& lock, const Act& act) {
  const std::shared_ptr<Task> task = queue_[ticket - popped_].task;
  begin_turn();
  lock.unlock();
  const bool result = act(*task);
  lock.lock();
  end_turn();
  return result;
}

bool Lane::run_if_met(std::uint64_t ticket, std::unique_lock<std::mutex>& lock) {
  while (popped_ < ticket && may_end_first()) {
    run_next(lock);
  }
  if (popped_ != ticket || queue_.empty() || is_running_ || is_claimed()) {
    return popped_ > ticket;
  }
  const bool has_met = in_turn(ticket, lock, [](Task& task) { return task.meet(); });
  if (has_met && popped_ == ticket) {  // the lane was not closed meanwhile
    run_next(lock);
  }
  return popped_ > ticket;
}

bool Lane::start(std::uint64_t ticket, std::unique_lock<std::mutex>& lock) {
  std::optional<Deadline> patience;  // from the first failure on
  while (popped_ <= ticket && !is_running_ && !is_closed_) {
    if (ticket > popped_ && !queue_[ticket - 1 - popped_].is_started) {
      return false;  // what is started is started in order
    }
    const bool has_started = in_turn(ticket, lock, [](Task& task) { return task.try_start(); });
    if (popped_ > ticket) {
      return true;  // the lane was closed meanwhile
    }
    if (has_started) {
      queue_[ticket - popped_].is_started = true;
      return true;
    }
    if (may_end_first()) {
      run_next(lock);
      continue;
    }
    if (is_claimed()) {
      return false;  // earlier ones are the progress thread's, which needs the turn for them
    }
    if (!patience) {
      patience = Deadline::after(kStartPatience);
    }
    if (!in_turn(ticket, lock, [](Task& task) { return task.await_start(); }) ||
        patience->has_passed()) {
      return false;
    }
  }
  return popped_ > ticket;
}

bool Lane::claim() {
  if (!queue_.empty() && !progress_.joinable() && !stop_thread_) {
    try {
      progress_ = std::thread([self = shared_from_this()] { self->progress_loop(); });
    } catch (const std::system_error&) {
      return false;
    }
    progress_id_.store(progress_.get_id(), std::memory_order_relaxed);
  }
  claimed_until_ = popped_ + queue_.size();
  work_arrived_.notify_one();
  return true;
}

void Lane::run_next(std::unique_lock<std::mutex>& lock) {
  turn_ended_.wait(lock, [&] { return !is_running_; });
  if (queue_.empty()) {
    return;
  }
  std::shared_ptr<Task> task = std::move(queue_.front().task);
  queue_.pop_front();
  ++popped_;
  begin_turn();
  lock.unlock();
  task->execute();
  lock.lock();
  end_turn();
  lock.unlock();
  task->complete();
  lock.lock();
  call_back(std::move(task), lock);
}

void Lane::call_back(std::shared_ptr<Task> task, std::unique_lock<std::mutex>& lock) {
  const bool is_progress = on_progress_thread();  // the only one that can come to be deep inside
  if (is_progress && Nesting::is_deep(this)) {
    left_.push_back(std::move(task));
    return;
  }
  while (task) {
    lock.unlock();
    {
      const Nesting nesting(this);
      task->call_back();
      task.reset();  // its destructor may call out, too
    }
    lock.lock();
    if (is_progress && !left_.empty()) {
      task = std::move(left_.front());
      left_.pop_front();
    }
  }
}

void Lane::progress_loop() {
  name_this_thread("horon-lane");
  std::unique_lock lock(mutex_);
  while (true) {
    work_arrived_.wait(
        lock, [&] { return stop_thread_ || (is_claimed() && !queue_.empty() && !is_running_); });
    if (stop_thread_) {
      return;
    }
    run_next(lock);
  }
}

bool Lane::help_until(FunctionRef<bool()> is_done) {
  std::unique_lock lock(mutex_);
  while (true) {
    lock.unlock();
    const bool done = is_done();
    lock.lock();
    if (done) {
      return true;
    }
    if (queue_.empty()) {
      return false;  // being completed, or failed, by another thread
    }
    if (is_inside_turn()) {
      throw Error(kInsideText);
    }
    if (on_progress_thread() || (!is_running_ && !is_claimed()) || !claim()) {
      run_next(lock);
    } else {
      return false;
    }
  }
}

bool Lane::hand_over() {
  const std::lock_guard lock(mutex_);
  return claim();
}

void Lane::poll() {
  std::unique_lock lock(mutex_);
  while (may_end_first()) {
    run_next(lock);
  }
}

void Lane::close(const Deadline& drain_until, const std::function<void()>& interrupt_running,
                 Callers callers) {
  std::unique_lock lock(mutex_);
  is_closed_ = true;
  const auto is_idle = [&] { return queue_.empty() && !is_running_; };
  const bool is_inside = is_inside_turn();
  if (!claim() && !is_inside) {  // nobody else may come by any more
    while (!queue_.empty() && !drain_until.has_passed()) {
      run_next(lock);
    }
  }
  // A running operation that is none of our business any more.
  const auto is_left = [&] { return is_running_inline_ && callers == Callers::kLeave; };
  if (!on_progress_thread() && !is_inside) {
    turn_ended_.wait_until(lock, drain_until.at(), is_idle);
  }
  std::deque<Queued> rest;
  rest.swap(queue_);
  popped_ += rest.size();
  const bool must_interrupt = is_running_ && !is_left();
  lock.unlock();
  if (must_interrupt) {
    interrupt_running();
  }
  lock.lock();
  // Before anything fails: one of the rest may be in the middle of its start.
  if (!on_progress_thread() && !is_inside) {
    turn_ended_.wait(lock, [&] { return !is_running_ || is_left(); });
  }
  lock.unlock();
  for (const auto& [task, is_started] : rest) {
    if (callers == Callers::kFail || !task->has_waiting_caller()) {
      task->fail(kClosedText);
      task->complete();
      task->call_back();
    }
  }
  lock.lock();
  stop_thread_ = true;
  if (!progress_.joinable() || on_progress_thread() || is_inside) {
    work_arrived_.notify_all();
    return;
  }
  std::thread thread = std::move(progress_);
  progress_id_.store({}, std::memory_order_relaxed);
  lock.unlock();
  work_arrived_.notify_all();
  thread.join();
}

}  // namespace horon
