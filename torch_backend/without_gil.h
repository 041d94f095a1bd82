// Letting go of the GIL where it may or may not be held.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace horon::torch_backend {

// For calls that come with the GIL held, as is_completed() and get_future() do, and that wait for,
// or run, what needs other threads of this process, which may want it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      released_.emplace();
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace horon::torch_backend
