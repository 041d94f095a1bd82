#include "named_engine_binding.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "named_calls.h"
#include "named_engine_host.h"
#include "named_errors.h"
#include "without_gil.h"

namespace py = pybind11;

namespace horon::torch_backend {
namespace {

// The engine's thread is joined when it goes: not with the GIL held.
std::shared_ptr<NamedEngineHost> make(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                      int size, std::chrono::milliseconds timeout,
                                      py::function make_gloo, const std::vector<int>& watched) {
  const GlooMaker maker = wrap_gloo_maker(std::move(make_gloo));
  const GilReleased no_gil;
  return translating_named([&] {
    return std::shared_ptr<NamedEngineHost>(
        new NamedEngineHost(store, rank, size, timeout, maker, watched),
        [](NamedEngineHost* dying) {
          const WithoutGil released;
          delete dying;
        });
  });
}

}  // namespace

void bind_named_engine(py::module_& module) {
  using Host = NamedEngineHost;
  using Names = std::vector<std::string>;
  using NoGil = py::call_guard<GilReleased>;
  static const py::handle internal_error =
      py::register_exception<InternalError>(module, "HorovodInternalError", PyExc_RuntimeError);
  py::class_<Host, std::shared_ptr<Host>>(module, "NamedEngine")
      .def(py::init(&make), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("make_gloo"), py::arg("watched_ranks") = std::vector<int>())
      .def(
          "allreduce",
          [](Host& self, const TensorList& tensors, const TensorList& outputs, const Names& names,
             int op, double prescale, double postscale, int set, int priority,
             bool will_wait_later) {
            return translating_named([&] {
              return self.submit(named_allreduce(self.view(set), tensors, outputs, names,
                                                 {op, prescale, postscale, priority}),
                                 will_wait_later && !self.has_spare_cores());
            });
          },
          py::arg("tensors"), py::arg("outputs"), py::arg("names"), py::arg("op"),
          py::arg("prescale"), py::arg("postscale"), py::arg("process_set"),
          py::arg("priority") = 0, py::arg("will_wait_later") = false, NoGil())
      .def(
          "allgather",
          [](Host& self, const TensorList& tensors, const Names& names, int set) {
            return translating_named([&] {
              return self.submit(named_allgather(self.view(set), tensors, names), false);
            });
          },
          py::arg("tensors"), py::arg("names"), py::arg("process_set"), NoGil())
      .def(
          "broadcast",
          [](Host& self, const at::Tensor& tensor, const at::Tensor& output, int root,
             const std::string& name, int set) {
            return translating_named([&] {
              return self.submit(named_broadcast(self.view(set), tensor, output, root, name),
                                 false);
            });
          },
          py::arg("tensor"), py::arg("output"), py::arg("root_rank"), py::arg("name"),
          py::arg("process_set"), NoGil())
      .def(
          "alltoall",
          [](Host& self, const at::Tensor& tensor,
             const std::optional<std::vector<std::int64_t>>& splits, const std::string& name,
             int set) {
            return translating_named([&] {
              return self.submit(named_alltoall(self.view(set), tensor, splits, name), false);
            });
          },
          py::arg("tensor"), py::arg("splits"), py::arg("name"), py::arg("process_set"), NoGil())
      .def(
          "reducescatter",
          [](Host& self, const TensorList& tensors, const Names& names, int op, double prescale,
             double postscale, int set) {
            return translating_named([&] {
              return self.submit(
                  named_reducescatter(self.view(set), tensors, names, {op, prescale, postscale, 0}),
                  false);
            });
          },
          py::arg("tensors"), py::arg("names"), py::arg("op"), py::arg("prescale"),
          py::arg("postscale"), py::arg("process_set"), NoGil())
      .def(
          "join",
          [](Host& self, int device) {
            return translating_named([&] { return self.join(device); });
          },
          py::arg("device") = 0, NoGil())
      .def(
          "barrier",
          [](Host& self, int set) { return translating_named([&] { return self.barrier(set); }); },
          py::arg("process_set"), NoGil())
      .def(
          "poll",
          [](Host& self, std::uint64_t handle) {
            return translating_named([&] { return self.poll(handle); });
          },
          py::arg("handle"), NoGil())
      .def(
          "wait",
          [](Host& self, std::uint64_t handle) {
            return translating_named([&] { return self.wait(handle); });
          },
          py::arg("handle"), NoGil())
      .def(
          "meet",
          [](Host& self, std::uint64_t handle) { translating_named([&] { self.meet(handle); }); },
          py::arg("handle"), NoGil())
      .def(
          "add_process_set",
          [](Host& self, std::vector<int> ranks) {
            return translating_named([&] { return self.add_process_set(std::move(ranks)); });
          },
          py::arg("ranks"), NoGil())
      .def(
          "remove_process_set",
          [](Host& self, int id) {
            return translating_named([&] { return self.remove_process_set(id); });
          },
          py::arg("id"), NoGil())
      .def(
          "process_set_ranks",
          [](Host& self, int id) { return translating_named([&] { return self.view(id).ranks; }); },
          py::arg("id"), NoGil())
      .def(
          "process_sets",
          [](Host& self) {
            return translating_named([&] { return self.engine().process_sets(); });
          },
          NoGil())
      .def(
          "start_timeline",
          [](Host& self, const std::string& path, bool mark_cycles) {
            translating_named([&] { self.start_timeline(path, mark_cycles); });
          },
          py::arg("path"), py::arg("mark_cycles") = false, NoGil())
      .def(
          "stop_timeline",
          [](Host& self) { translating_named([&] { self.engine().timeline().stop(); }); }, NoGil())
      .def(
          "shutdown", [](Host& self) { translating_named([&] { self.engine().shutdown(); }); },
          NoGil())
      .def(
          "abort",
          [](Host& self, const std::string& reason) {
            translating_named([&] { self.engine().abort(reason); });
          },
          py::arg("reason"), NoGil())
      .def("calls",
           [](const std::shared_ptr<Host>& self) { return make_named_calls(self, internal_error); })
      .def(
          "handles",
          [](Host& self) { return translating_named([&] { return self.engine().handles(); }); },
          NoGil())
      .def_property_readonly("is_running", [](Host& self) { return self.engine().is_running(); });
}

}  // namespace horon::torch_backend
