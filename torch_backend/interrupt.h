// Ctrl-C while a call blocks in C++.
#pragma once

#include <exception>
#include <functional>

namespace horon::torch_backend {

// For WaitContext: on the main thread, a function that runs pending signal handlers and throws what
// they raise (KeyboardInterrupt); null on other threads, where Python runs none.
const std::function<void()>* interrupt_check();

// A call from Python that may run other operations than its own. What a signal handler raised in
// one of those belongs to the call, not to the operation's handle, which nobody may ever look at.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // Throws what a signal handler raised on this thread since the scope began.
  void rethrow() const;

  // Whether this thread is in such a call: else nobody would deliver what a handler raises.
  static bool is_active();

 private:
  friend void keep_interrupt(std::exception_ptr error);

  InterruptScope* const outer_;
  std::exception_ptr raised_;
};

}  // namespace horon::torch_backend
