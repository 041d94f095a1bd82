#include "interrupt.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace horon::torch_backend {
namespace {

thread_local InterruptScope* innermost_scope = nullptr;

}  // namespace

void keep_interrupt(std::exception_ptr error) {
  if (innermost_scope != nullptr) {
    innermost_scope->raised_ = std::move(error);
  }
}

InterruptScope::InterruptScope() : outer_(innermost_scope) { innermost_scope = this; }

InterruptScope::~InterruptScope() { innermost_scope = outer_; }

bool InterruptScope::is_active() { return innermost_scope != nullptr; }

void InterruptScope::rethrow() const {
  if (raised_) {
    std::rethrow_exception(raised_);
  }
}

namespace {

void run_signal_handlers() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    const auto raised = std::make_exception_ptr(pybind11::error_already_set());
    keep_interrupt(raised);
    std::rethrow_exception(raised);
  }
}

}  // namespace

const std::function<void()>* interrupt_check() {
  static const std::function<void()> check = run_signal_handlers;
  static thread_local const bool is_main_thread = ::syscall(SYS_gettid) == ::getpid();
  return is_main_thread ? &check : nullptr;
}

}  // namespace horon::torch_backend
