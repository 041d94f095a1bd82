#include "process_exit.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace horon::torch_backend {
namespace {

constexpr std::chrono::seconds kPatience{5};

struct ExitState {
  std::mutex mutex;
  std::condition_variable call_ended;
  int calls_out = 0;        // guarded by mutex
  bool is_exiting = false;  // guarded by mutex
};

// Never destroyed: threads may stay in it until the process is gone.
ExitState& state() {
  static auto* state = new ExitState();
  return *state;
}

}  // namespace

void mark_process_exiting() {
  std::unique_lock lock(state().mutex);
  state().is_exiting = true;
}

void await_calls_out() {
  std::unique_lock lock(state().mutex);
  state().call_ended.wait_for(lock, kPatience, [] { return state().calls_out == 0; });
}

void stay_if_process_exits() {
  {
    const std::lock_guard lock(state().mutex);
    if (!state().is_exiting || ::syscall(SYS_gettid) == ::getpid()) {
      return;
    }
  }
  while (true) {
    ::pause();  // until the process ends
  }
}

CallOut::CallOut() {
  const std::lock_guard lock(state().mutex);
  ++state().calls_out;
}

CallOut::~CallOut() {
  const std::lock_guard lock(state().mutex);
  --state().calls_out;
  state().call_ended.notify_all();
}

}  // namespace horon::torch_backend
