#include "abort_hooks.h"

#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "core/log.h"
#include "core/thread_name.h"
#include "process_exit.h"
#include "without_gil.h"

namespace horon::torch_backend {
namespace {

// Torch's dumps give up sooner.
constexpr std::chrono::seconds kPatience{60};

// Whether this thread is in a hook: it must not wait for itself.
thread_local bool is_in_hook = false;

}  // namespace

void AbortHooks::remove(std::int64_t id) {
  table_.remove(id);
  if (is_in_hook || fork_generation_ != fork_generation()) {
    return;  // in a child there is no such thread
  }
  const WithoutGil no_gil;
  std::unique_lock lock(mutex_);
  if (!call_ended_.wait_for(lock, kPatience, [this] { return !is_called_; })) {
    log_warning(
        "a hook of a process group that has failed does not end; it is taken away all the same");
  }
}

void AbortHooks::call_all_beside() {
  if (table_.is_empty() || is_process_exiting() || fork_generation_ != fork_generation()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (is_called_) {
      return;
    }
    is_called_ = true;
  }
  // Made here: exit waits for it also where the thread has not begun.
  auto call_out = std::make_unique<CallOut>();
  try {
    std::thread([call_out = std::move(call_out), self = shared_from_this()] {
      name_this_thread("horon-abort");
      self->call_in_turn();
    }).detach();
  } catch (const std::system_error&) {
    call_in_turn();
  }
}

void AbortHooks::call_in_turn() {
  is_in_hook = true;
  call_all();
  is_in_hook = false;
  const std::lock_guard lock(mutex_);
  is_called_ = false;
  call_ended_.notify_all();
}

}  // namespace horon::torch_backend
