// Letting go of the GIL, and what a thread does that wants it back while the process ends.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "process_exit.h"

namespace horon::torch_backend {

// For calls that come with the GIL held. As pybind11's gil_scoped_release, except that a thread
// that may not go back into Python any more stays here (process_exit.h).
class GilReleased {
 public:
  GilReleased() = default;
  ~GilReleased() { stay_if_process_exits(); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  pybind11::gil_scoped_release released_;
};

// For calls that come with or without it, and that wait for, or run, what needs other threads of
// this process, which may want it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      released_.emplace();
    }
  }

 private:
  std::optional<GilReleased> released_;
};

}  // namespace horon::torch_backend
