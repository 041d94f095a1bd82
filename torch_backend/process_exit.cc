#include "process_exit.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/of_this_process.h"
#include "core/thread_name.h"

namespace horon::torch_backend {

// Of one process. A forked child counts anew: the threads that its parent's counts, and whoever may
// hold the mutex, are not in it.
struct CallsOut {
  const std::uint32_t fork_generation = horon::fork_generation();
  std::mutex mutex;
  std::condition_variable call_ended;
  int count = 0;  // guarded by mutex
};

namespace {

// Torch's first dump of a flight recorder takes five on a slow disk.
constexpr std::chrono::seconds kPatience{15};

constinit std::atomic<bool> is_exiting{false};
constinit std::atomic<CallsOut*> current_calls{nullptr};

CallsOut& calls_out() {
  return of_this_process(current_calls, [] { return new CallsOut; });
}

}  // namespace

void mark_process_exiting() {
  // A thread that has not seen it goes back to an interpreter that is still whole: exit goes on to
  // wait for others for longer than that takes.
  is_exiting.store(true, std::memory_order_seq_cst);
}

bool is_process_exiting() { return is_exiting.load(std::memory_order_relaxed); }

void await_calls_out() {
  CallsOut& calls = calls_out();
  std::unique_lock lock(calls.mutex);
  calls.call_ended.wait_for(lock, kPatience, [&] { return calls.count == 0; });
}

void stay_if_process_exits() {
  if (!is_process_exiting() || on_own_thread() || ::syscall(SYS_gettid) == ::getpid()) {
    return;
  }
  while (true) {
    ::pause();  // until the process ends
  }
}

CallOut::CallOut() : calls_(&calls_out()) {
  const std::lock_guard lock(calls_->mutex);
  ++calls_->count;
}

CallOut::~CallOut() {
  if (calls_->fork_generation != fork_generation()) {
    return;  // the call has forked: it goes on in the parent
  }
  const std::lock_guard lock(calls_->mutex);
  --calls_->count;
  calls_->call_ended.notify_all();
}

}  // namespace horon::torch_backend
