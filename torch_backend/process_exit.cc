#include "process_exit.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace horon::torch_backend {
namespace {

constexpr std::chrono::seconds kPatience{5};

struct ExitState {
  std::mutex mutex;
  std::condition_variable call_ended;
  int calls_out = 0;  // guarded by mutex
  std::atomic<bool> is_exiting{false};
};

// Never destroyed: threads may stay in it until the process is gone.
ExitState& exit_state() {
  static auto* state = new ExitState();
  return *state;
}

}  // namespace

void mark_process_exiting() {
  // A thread that has not seen it goes back to an interpreter that is still whole: exit goes on to
  // wait for others for longer than that takes.
  exit_state().is_exiting.store(true, std::memory_order_seq_cst);
}

void await_calls_out() {
  std::unique_lock lock(exit_state().mutex);
  exit_state().call_ended.wait_for(lock, kPatience, [] { return exit_state().calls_out == 0; });
}

void stay_if_process_exits() {
  if (!exit_state().is_exiting.load(std::memory_order_relaxed) ||
      ::syscall(SYS_gettid) == ::getpid()) {
    return;
  }
  while (true) {
    ::pause();  // until the process ends
  }
}

CallOut::CallOut() {
  const std::lock_guard lock(exit_state().mutex);
  ++exit_state().calls_out;
}

CallOut::~CallOut() {
  const std::lock_guard lock(exit_state().mutex);
  --exit_state().calls_out;
  exit_state().call_ended.notify_all();
}

}  // namespace horon::torch_backend
