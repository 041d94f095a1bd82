// A lane runs the operations of one group one after another, in the order in which they were
// issued.
//
// Note [Tickets]
// A place in the order is taken when an operation is issued, under the lane's mutex. A synchronous
// operation runs on its caller's thread when nothing is queued or running; otherwise it queues and
// its caller waits. Asynchronous operations run on the lane's progress thread, which starts with
// the first of them and sleeps on a condition variable when there is nothing to do. A callback that
// runs on the progress thread may itself wait or issue operations: it then works off the queue
// inline.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/deadline.h"

namespace horon {

// One queued operation. Ownership: shared by the queue and by whoever waits for it.
class Task {
 public:
  virtual ~Task() = default;
  // Runs the operation; keeps what it throws for complete().
  virtual void execute() noexcept = 0;
  // Tells the world, callbacks included. Called once, with no lock held, after execute() or fail().
  virtual void complete() noexcept = 0;
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
  // Throws GroupError when the lane is closed.
  void run(const std::function<void()>& operation);

  // Queues `task` for the progress thread; on that thread itself, runs the queue and the task
  // before it returns. Throws GroupError when the lane is closed.
  void submit(std::shared_ptr<Task> task);

  // On the progress thread: works off the queue until `is_done()` or it is empty, since nobody else
  // would. On other threads: returns at once.
  void help_until(const std::function<bool()>& is_done);

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
  // Takes the first task off the queue and runs it. Requires a non-empty queue and the lock; gives
  // the lock back held.
  void run_next(std::unique_lock<std::mutex>& lock);
  void start_thread();
  void check_open() const;
  bool on_progress_thread() const { return std::this_thread::get_id() == progress_id_; }

  std::mutex mutex_;
  // Guarded by mutex_:
  std::condition_variable work_arrived_;  // for the progress thread
  std::condition_variable turn_ended_;    // for callers and close()
  std::deque<std::shared_ptr<Task>> queue_;
  bool is_running_ = false;
  bool is_running_inline_ = false;  // on the thread of a caller of run()
  bool is_closed_ = false;
  bool stop_thread_ = false;
  std::thread progress_;
  std::thread::id progress_id_;
};

}  // namespace horon
