// What a blocking call needs to know besides what it waits for.
#pragma once

#include <functional>

#include "core/deadline.h"

namespace horon {

struct WaitContext {
  Deadline deadline;
  // Called now and then by a wait that takes long, on the waiting thread; throws to abandon the
  // wait (a pending KeyboardInterrupt). May be null.
  const std::function<void()>* check_interrupt = nullptr;
  // The waiting thread is a caller's, with nothing else to do: see Note [Lingering] in
  // shm/wait_policy.h.
  bool may_linger = false;
};

}  // namespace horon
