// A lane runs the operations of one group one after another, in the order in which they were
// issued.
//
// Note [Tickets]
// A place in the order is taken when an operation is issued, under the lane's mutex. A synchronous
// operation runs on its caller's thread when nothing is queued or running; otherwise it queues, and
// its caller helps.
//
// Note [Split phase]
// An asynchronous operation is started by its caller when that can be done without waiting and
// everything before it was started: then the other ranks have what they need from this one. It is
// ended by whoever waits for it, or polls, or comes by with a synchronous operation: no thread is
// involved. What could not be started, and what has a callback, is the progress thread's: it has
// claimed the queue up to the last such operation. The thread starts with the first claim and
// sleeps on a condition variable while nothing is claimed. Waiters run operations themselves unless
// the thread has claimed them. A callback on the progress thread may itself wait or issue
// operations: it then works off the queue inline.
//
// Note [Meetings of a lane]
// Where every rank has one core, the progress thread takes turns with whoever issued the operation
// and computes on, and each rank waits for the other's turns; besides, it has to be woken, and to
// wake who waits in the end. If all ranks come to an operation at about the same time, as in a
// backward pass, the threads that issue it had better run it, all at once (Task::meet). Where they
// don't, it is the progress thread's as ever.
//
// Note [Inside a turn]
// A signal handler may run in the middle of an operation, on the thread that has the turn, and call
// the same lane. It must not wait for that turn: run() and waits throw instead, and close() leaves
// what waits to the operation itself, which it makes fail.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/deadline.h"
#include "core/function_ref.h"

namespace horon {

// One queued operation. Ownership: shared by the queue and by whoever waits for it.
class Task {
 public:
  virtual ~Task() = default;
  // Starts the operation, if that needs no waiting; false, and nothing has happened, if not.
  virtual bool try_start() noexcept { return false; }
  // After try_start() failed: waits a little (a millisecond or two) for what it lacked. False
  // when that will not change by waiting.
  virtual bool await_start() noexcept { return false; }
  // After try_start() failed, of the first in the queue: whether the others have come to it as
  // well, so that whoever issued it had better execute it at once. May wait for some milliseconds.
  // Called at most once, in turn; execute() or fail() follows, on any thread.
  virtual bool meet() noexcept { return false; }
  // Of a started operation: whether execute() would not wait. Called in turn, with the lane's lock.
  virtual bool is_ready() noexcept { return false; }
  // Runs the operation, or what is left of it after its start; keeps what it throws for complete().
  virtual void execute() noexcept = 0;
  // Tells whoever waits or polls. Called once, with no lock held, after execute() or fail().
  virtual void complete() noexcept = 0;
  // Then tells those that wanted to be called, who may issue operations and wait for them. Called
  // once, with no lock held; it may be some time later. See Note [Nested callbacks] in nesting.h.
  virtual void call_back() noexcept {}
  // Instead of execute(), when the lane closed first.
  virtual void fail(const std::string& reason) noexcept = 0;
  // True when a caller of Lane::run waits for it.
  virtual bool has_waiting_caller() const { return false; }
};

// Thread safety: all methods, from any thread.
// Ownership: make it with std::make_shared. The progress thread holds a share, because the last
// other owner may go away inside a callback on that very thread.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  Lane() = default;
  // Requires close() before, but in a forked child.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Runs `operation` in its turn and returns when it has finished; throws what it throws.
  // Throws GroupError when the lane is closed, and Error inside one of its own operations.
  //
  // While it waits for its turn it calls `check_interrupt`, if any, now and then. If that throws,
  // `give_up` has to make what was issued before fail soon; then what it threw is passed on.
  void run(FunctionRef<void()> operation, const std::function<void()>* check_interrupt = nullptr,
           const std::function<void()>& give_up = {});

  // Starts `task`, or queues it for the progress thread; on that thread itself, runs the queue and
  // the task before it returns. Throws GroupError when the lane is closed.
  void submit(std::shared_ptr<Task> task);

  // Runs queued operations on this thread until `is_done()` (called without a lock) or somebody
  // else has to end what is left: then the progress thread is on it, and the caller may sleep until
  // it is told. Returns is_done()'s last value. Throws Error inside an operation of the lane.
  bool help_until(FunctionRef<bool()> is_done);

  // Leaves everything queued to the progress thread, for callbacks and for waits with a limit.
  // False if the system gives no thread: then somebody has to help.
  bool hand_over();

  // Ends started operations that need no waiting.
  void poll();

  bool on_progress_thread() const {
    return std::this_thread::get_id() == progress_id_.load(std::memory_order_relaxed);
  }

  // What close() does about callers that wait inside run() when time is up.
  enum class Callers {
    kFail,   // they get an error
    kLeave,  // they stay where they are: the process is about to end, and a thread that came back
             // to an interpreter that is being taken apart would crash it
  };

  // Lets queued operations run until the deadline, then calls `interrupt_running` (which must make
  // a running operation fail soon), fails what is left and ends the progress thread. Idempotent.
  // Not to be called with a lock that an operation or a callback could want.
  void close(const Deadline& drain_until, const std::function<void()>& interrupt_running,
             Callers callers = Callers::kFail);

 private:
  void progress_loop();
  struct Queued {
    std::shared_ptr<Task> task;
    bool is_started = false;
  };

  // Takes the first task off the queue and runs it, unless the queue is empty when the turn comes.
  // Gives the lock back held.
  void run_next(std::unique_lock<std::mutex>& lock);
  // Calls back for a task that has run, or leaves that. Gives the lock back held.
  void call_back(std::shared_ptr<Task> task, std::unique_lock<std::mutex>& lock);
  // Adds to the queue and returns the task's ticket. Requires the lock.
  std::uint64_t push(std::shared_ptr<Task> task);
  // Tries to start the task with that ticket, ending earlier ones where that makes room; false
  // when the progress thread has to run it.
  bool start(std::uint64_t ticket, std::unique_lock<std::mutex>& lock);
  // Runs the task with that ticket if it is the first and meets the others; false when the progress
  // thread has to run it. See Note [Meetings of a lane]. Requires the lock.
  bool run_if_met(std::uint64_t ticket, std::unique_lock<std::mutex>& lock);
  // Calls `act` with a queued task in turn, without the lock. Requires the lock.
  template <typename Act>
  bool in_turn(std::uint64_t ticket, std::unique_lock<std::mutex>& lock, const Act& act);
  // Both require the lock.
  void begin_turn();
  void end_turn();
  // Whether this thread is in the middle of one of the lane's operations. Requires the lock.
  bool is_inside_turn() const { return is_running_ && turn_holder_ == std::this_thread::get_id(); }
  // The progress thread is to run what is queued now. False if there is none and the system gives
  // no thread: then whoever waits has to run it. Requires the lock.
  bool claim();
  bool is_claimed() const { return popped_ < claimed_until_; }
  bool may_end_first() const;
  void check_open() const;

  std::mutex mutex_;
  // Guarded by mutex_:
  std::condition_variable work_arrived_;  // for the progress thread
  std::condition_variable turn_ended_;    // for callers and close()
  std::deque<Queued> queue_;
  std::uint64_t popped_ = 0;         // tickets that have left the queue; the first one's ticket
  std::uint64_t claimed_until_ = 0;  // tickets below it are the progress thread's
  std::deque<std::shared_ptr<Task>> left_;  // whose callbacks the progress thread has left
  bool is_running_ = false;
  std::thread::id turn_holder_;     // while is_running_
  bool is_running_inline_ = false;  // on the thread of a caller of run()
  bool is_closed_ = false;
  bool stop_thread_ = false;
  std::thread progress_;
  // Atomic, for on_progress_thread(): a thread knows itself, whatever it sees of others.
  std::atomic<std::thread::id> progress_id_{};
};

}  // namespace horon
