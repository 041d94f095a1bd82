#include "interrupt.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace horon::torch_backend {
namespace {

void run_signal_handlers() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

}  // namespace

const std::function<void()>* interrupt_check() {
  static const std::function<void()> check = run_signal_handlers;
  static thread_local const bool is_main_thread = ::syscall(SYS_gettid) == ::getpid();
  return is_main_thread ? &check : nullptr;
}

}  // namespace horon::torch_backend
