#include "gradient_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradient_bucket.h"
#include "gradient_hooks.h"
#include "gradient_pack.h"
#include "named_errors.h"
#include "without_gil.h"

namespace py = pybind11;

namespace horon::torch_backend {

void bind_gradients(py::module_& module) {
  using NoGil = py::call_guard<GilReleased>;
  using Pack = std::shared_ptr<GradientPack>;
  py::class_<GradientPack, std::shared_ptr<GradientPack>>(module, "GradientPack")
      .def(py::init<const std::vector<at::Tensor>&, at::Tensor, const std::vector<at::Tensor>&>(),
           py::arg("parameters"), py::arg("buffer"), py::arg("views"))
      .def("view", py::overload_cast<std::size_t>(&GradientPack::view, py::const_),
           py::arg("index"))
      .def("pack", &GradientPack::pack)
      .def("put_back", &GradientPack::put_back);
  py::class_<GradientBucket, std::shared_ptr<GradientBucket>>(module, "GradientBucket")
      .def(py::init([](std::string name, int op, double prescale, double postscale, int priority,
                       at::Tensor parameter, std::vector<std::int64_t> strides) {
             return std::make_shared<GradientBucket>(
                 GradientBucket::Order{std::move(name), {op, prescale, postscale, priority}},
                 std::move(parameter), std::move(strides));
           }),
           py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
           py::arg("priority"), py::arg("parameter"), py::arg("strides"))
      .def(py::init([](std::string name, int op, double prescale, double postscale, int priority,
                       Pack pack, at::Tensor buffer) {
             return std::make_shared<GradientBucket>(
                 GradientBucket::Order{std::move(name), {op, prescale, postscale, priority}},
                 std::move(pack), std::move(buffer));
           }),
           py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
           py::arg("priority"), py::arg("pack"), py::arg("buffer"))
      .def("set_engine", &GradientBucket::set_engine, py::arg("engine"), py::arg("process_set"))
      .def(
          "try_send",
          [](GradientBucket& self) { return translating_named([&] { return self.try_send(); }); },
          NoGil())
      .def_property_readonly("n_made", &GradientBucket::n_made)
      .def_property_readonly("is_out", &GradientBucket::is_out);
  py::class_<GradientHooks>(module, "GradientHooks")
      .def(py::init([](const std::vector<at::Tensor>& parameters, int passes, py::function lay_out,
                       py::function send, py::function refuse) {
             return std::make_unique<GradientHooks>(
                 parameters, passes,
                 GradientHooks::Callbacks{std::move(lay_out), std::move(send), std::move(refuse)});
           }),
           py::arg("parameters"), py::arg("passes"), py::arg("lay_out"), py::arg("send"),
           py::arg("refuse"))
      .def(
          "set_buckets",
          [](GradientHooks& self, const std::vector<int>& bucket_of,
             std::vector<std::optional<GradientHooks::Place>> place_of,
             std::vector<GradientHooks::SharedBucket> buckets) {
            translating_named(
                [&] { self.set_buckets(bucket_of, std::move(place_of), std::move(buckets)); });
          },
          py::arg("bucket_of"), py::arg("place_of"), py::arg("buckets"))
      .def("begin_step", &GradientHooks::begin_step, NoGil())
      .def("not_sent", &GradientHooks::not_sent)
      .def(
          "receive", [](GradientHooks& self) { translating_named([&] { self.receive(); }); },
          NoGil())
      .def("reset", &GradientHooks::reset, py::arg("passes"))
      .def_property_readonly("n_set_aside", &GradientHooks::n_set_aside)
      .def_property_readonly("has_gradients", &GradientHooks::has_gradients);
}

}  // namespace horon::torch_backend
