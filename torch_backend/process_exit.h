// What threads do that are still inside horon when the interpreter ends.
#pragma once

namespace horon::torch_backend {

// The main thread has begun to end the process; called by atexit.
void mark_process_exiting();
bool is_process_exiting();

// Waits (15 seconds at most) until no CallOut lives. Not to be called with the GIL held.
void await_calls_out();

// On other threads than the main one and horon's own, once the process is exiting: never returns. A
// (daemon) thread that went back into Python now would be ended by it through C++ frames, which
// aborts the process. Python 3.14 does the same. Exit waits for horon's own, which run callbacks.
void stay_if_process_exits();

struct CallsOut;

// While it lives, this thread is in code that may want the GIL: torch's hooks, callbacks,
// destructors of tensors and process groups. The interpreter must not be taken apart before it has
// come back.
class CallOut {
 public:
  CallOut();
  ~CallOut();
  CallOut(const CallOut&) = delete;
  CallOut& operator=(const CallOut&) = delete;

 private:
  CallsOut* const calls_;
};

}  // namespace horon::torch_backend
