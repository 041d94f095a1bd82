// Synchronous operations: on the caller's thread, in their group's turn.
#pragma once

#include <chrono>

#include "abort_hooks.h"
#include "core/function_ref.h"
#include "core/wait_context.h"
#include "group.h"

namespace horon::torch_backend {

// Calls `operation` when everything that was issued before has ended. Ctrl-C ends it on the main
// thread. Throws what torch.distributed's users expect; after an error that ends the group, the
// abort hooks are called.
void run_in_turn(Group& group, AbortHooks& on_abort, std::chrono::milliseconds timeout,
                 FunctionRef<void(const WaitContext&)> operation);

}  // namespace horon::torch_backend
