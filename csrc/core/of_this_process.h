// What a process has one of: made when it is first wanted, and anew in a forked child, where the
// parent's names threads that are not there, and its mutex may be held. Never destroyed, since
// threads may still want it while the process ends.
#pragma once

#include <atomic>

#include "core/fork_guard.h"

namespace horon {

// T has a member `fork_generation`, of when it was made. `make()`: a new one; may be called by
// several threads, of whose results all but one are deleted.
template <typename T, typename Make>
T& of_this_process(std::atomic<T*>& current, const Make& make) {
  T* known = current.load(std::memory_order_acquire);
  if (known != nullptr && known->fork_generation == fork_generation()) {
    return *known;
  }
  T* made = make();
  // Release: who finds it finds it made.
  if (current.compare_exchange_strong(known, made, std::memory_order_acq_rel)) {
    return *made;
  }
  delete made;  // another thread was first
  return *known;
}

}  // namespace horon
