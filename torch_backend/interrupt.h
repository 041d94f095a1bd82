// Lets a blocked main thread notice Ctrl-C.
#pragma once

#include <functional>

namespace horon::torch_backend {

// A function for WaitContext::check_interrupt: runs pending Python signal handlers and throws what
// they raise (KeyboardInterrupt). Null when this is not the main thread, the only one that runs
// handlers.
const std::function<void()>* interrupt_check();

}  // namespace horon::torch_backend
