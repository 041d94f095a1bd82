// Functions that others want called before a group ends in error: torch's flight recorder dumps
// what it has recorded.
//
// Note [Abort hooks beside the error]
// The first dump of a process takes seconds: to name what it finds in stack traces it imports much
// of torch. Whoever waits for a rank that has died wants the error at once, to save a checkpoint,
// or before torchrun kills it as well. So hooks run on a thread of their own. Whoever takes a hook
// away waits for it, since its owner may go then, and so does the process at its end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "core/fork_guard.h"
#include "hook_table.h"

namespace horon::torch_backend {

// Thread safety: all methods. Shared ownership: hooks may run when the backend is gone.
class AbortHooks : public std::enable_shared_from_this<AbortHooks> {
 public:
  void add(std::int64_t id, std::function<void()> hook) { table_.add(id, std::move(hook)); }
  // Returns when the hook does not run any more, or after a minute. The GIL may be held, and is
  // released meanwhile.
  void remove(std::int64_t id);

  // Calls all hooks, here.
  void call_all() const { table_.call_all(); }
  // Has them called by another thread; here, where none can be made. Nothing where they are being
  // called so already, or the process is ending, in which they could not run.
  void call_all_beside();

 private:
  void call_in_turn();

  HookTable<> table_;
  const std::uint32_t fork_generation_ = fork_generation();
  std::mutex mutex_;
  std::condition_variable call_ended_;
  bool is_called_ = false;  // guarded by mutex_
};

}  // namespace horon::torch_backend
