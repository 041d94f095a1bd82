#include "gloo_maker.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <memory>
#include <utility>

namespace py = pybind11;

namespace horon::torch_backend {

GlooMaker wrap_gloo_maker(py::function function) {
  // Shared: the function must be released with the GIL held, wherever the last copy dies.
  const std::shared_ptr<py::function> held(new py::function(std::move(function)),
                                           [](py::function* dying) {
                                             if (Py_IsInitialized() != 0) {
                                               const py::gil_scoped_acquire gil;
                                               delete dying;
                                             }
                                           });
  return [held](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    return (*held)(store, rank, size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

}  // namespace horon::torch_backend
