#include "core/lane.h"

#include <exception>

#include "core/error.h"
#include "core/thread_name.h"

namespace horon {
namespace {

// A synchronous operation that had to queue: its caller waits until the progress thread has run it.
class InlineTask final : public Task {
 public:
  explicit InlineTask(const std::function<void()>& operation) : operation_(operation) {}

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

  void wait_and_rethrow() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done_; });
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  const std::function<void()>& operation_;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;  // guarded by mutex_
};

constexpr const char* kClosedText =
    "the process group was destroyed or aborted; it can not run operations any more";

}  // namespace

Lane::~Lane() {
  if (progress_.joinable()) {
    // Either a forked child, where the thread does not exist, or the thread itself, at its end.
    progress_.detach();
  }
}

void Lane::check_open() const {
  if (is_closed_) {
    throw GroupError(kClosedText);
  }
}

void Lane::run(const std::function<void()>& operation) {
  std::unique_lock lock(mutex_);
  check_open();
  if (on_progress_thread()) {
    // Until another caller's running operation has ended, too: queueing behind it would wait for
    // ourselves.
    while (!queue_.empty() || is_running_) {
      run_next(lock);
    }
  }
  if (queue_.empty() && !is_running_) {
    is_running_ = true;
    is_running_inline_ = !on_progress_thread();
    lock.unlock();
    struct EndTurn {
      Lane* lane;
      ~EndTurn() {
        const std::lock_guard lock(lane->mutex_);
        lane->is_running_ = false;
        lane->is_running_inline_ = false;
        lane->turn_ended_.notify_all();
        if (!lane->queue_.empty()) {
          lane->work_arrived_.notify_one();
        }
      }
    } end_turn{this};
    operation();
    return;
  }
  auto task = std::make_shared<InlineTask>(operation);
  queue_.push_back(task);
  start_thread();
  lock.unlock();
  work_arrived_.notify_one();
  task->wait_and_rethrow();
}

void Lane::submit(std::shared_ptr<Task> task) {
  {
    std::unique_lock lock(mutex_);
    check_open();
    queue_.push_back(std::move(task));
    if (on_progress_thread()) {
      // A callback issued it, and may go on to wait in a way that does not come by here (the wait
      // of a Future): nobody but this thread would ever run it.
      for (std::size_t left = queue_.size(); left > 0 && !queue_.empty(); --left) {
        run_next(lock);
      }
      return;
    }
    start_thread();
  }
  work_arrived_.notify_one();
}

void Lane::start_thread() {
  if (!progress_.joinable()) {
    progress_ = std::thread([self = shared_from_this()] { self->progress_loop(); });
    progress_id_ = progress_.get_id();
  }
}

void Lane::run_next(std::unique_lock<std::mutex>& lock) {
  turn_ended_.wait(lock, [&] { return !is_running_; });
  if (queue_.empty()) {
    return;
  }
  std::shared_ptr<Task> task = std::move(queue_.front());
  queue_.pop_front();
  is_running_ = true;
  lock.unlock();
  task->execute();
  lock.lock();
  is_running_ = false;
  turn_ended_.notify_all();
  lock.unlock();
  task->complete();
  task.reset();  // its destructor may call out, too
  lock.lock();
}

void Lane::progress_loop() {
  name_this_thread("horon-lane");
  std::unique_lock lock(mutex_);
  while (true) {
    work_arrived_.wait(lock, [&] { return stop_thread_ || (!queue_.empty() && !is_running_); });
    if (stop_thread_) {
      return;
    }
    run_next(lock);
  }
}

void Lane::help_until(const std::function<bool()>& is_done) {
  std::unique_lock lock(mutex_);
  if (!on_progress_thread()) {
    return;
  }
  while (!queue_.empty()) {
    run_next(lock);
    lock.unlock();
    const bool done = is_done();
    lock.lock();
    if (done) {
      return;
    }
  }
}

void Lane::close(const Deadline& drain_until, const std::function<void()>& interrupt_running,
                 Callers callers) {
  std::unique_lock lock(mutex_);
  is_closed_ = true;
  const auto is_idle = [&] { return queue_.empty() && !is_running_; };
  // A running operation that is none of our business any more.
  const auto is_left = [&] { return is_running_inline_ && callers == Callers::kLeave; };
  if (!on_progress_thread()) {
    turn_ended_.wait_until(lock, drain_until.at(), is_idle);
  }
  std::deque<std::shared_ptr<Task>> rest;
  rest.swap(queue_);
  const bool must_interrupt = is_running_ && !is_left();
  lock.unlock();
  if (must_interrupt) {
    interrupt_running();
  }
  for (const std::shared_ptr<Task>& task : rest) {
    if (callers == Callers::kFail || !task->has_waiting_caller()) {
      task->fail(kClosedText);
      task->complete();
    }
  }
  lock.lock();
  if (!on_progress_thread()) {
    turn_ended_.wait(lock, [&] { return !is_running_ || is_left(); });
  }
  stop_thread_ = true;
  if (!progress_.joinable() || on_progress_thread()) {
    work_arrived_.notify_all();
    return;
  }
  std::thread thread = std::move(progress_);
  progress_id_ = {};
  lock.unlock();
  work_arrived_.notify_all();
  thread.join();
}

}  // namespace horon
