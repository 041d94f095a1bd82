// The Python module horon._C. No logic: names, types, and the GIL.

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <torch/python.h>

#include <optional>
#include <utility>

#include "backend.h"
#ifdef HORON_CUDA
#include "cuda/cuda_lane.h"
#include "cuda/cuda_pack.h"
#endif
#include "core/error.h"
#include "ddp_arena_hook.h"
#include "gradient_allocator.h"
#include "gradient_bindings.h"
#include "live_groups.h"
#include "named_engine_binding.h"
#include "operator_call.h"
#include "operators.h"
#include "process_arena.h"
#include "reconfigurable_backend.h"
#include "reduce/reduce.h"
#include "roll_call.h"
#include "watch/watch_post.h"
#include "without_gil.h"

namespace py = pybind11;

namespace horon::torch_backend {
namespace {

c10::intrusive_ptr<HoronBackend> create_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size,
                                                const c10::intrusive_ptr<BackendOptions>& options,
                                                py::function make_gloo, bool is_empty) {
  const GlooMaker maker = wrap_gloo_maker(std::move(make_gloo));
  const GilReleased no_gil;
#if HORON_HAS_RECONFIGURE
  if (is_empty) {
    return c10::make_intrusive<ReconfigurableBackend>(ReconfigurableBackend::Empty(), store, rank,
                                                      size, options, maker);
  }
  return c10::make_intrusive<ReconfigurableBackend>(store, rank, size, options, maker);
#else
  TORCH_CHECK(!is_empty, "horon: groups whose members change need torch 2.15 or newer.");
  return c10::make_intrusive<HoronBackend>(store, rank, size, options, maker);
#endif
}

}  // namespace
}  // namespace horon::torch_backend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace horon::torch_backend;
  using NoGil = py::call_guard<GilReleased>;
  py::module_::import("torch.distributed");  // registers the base classes

  py::class_<BackendOptions, c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>> options(
      module, "Options");
  const auto add_option = [&options]<typename Value>(const char* name,
                                                     Value horon::Options::* member) {
    options.def_property(
        name, [member](const BackendOptions& self) { return self.engine.*member; },
        [member](BackendOptions& self, Value value) { self.engine.*member = std::move(value); });
  };
  add_option("inline_bytes", &horon::Options::inline_bytes);
  add_option("deposit_bytes", &horon::Options::deposit_bytes);
  add_option("buffer_bytes", &horon::Options::buffer_bytes);
  add_option("ring_bytes", &horon::Options::ring_bytes);
  add_option("eager_bytes", &horon::Options::eager_bytes);
  add_option("claiming", &horon::Options::claiming);
  add_option("cuda_batch_bytes", &horon::Options::cuda_batch_bytes);
  add_option("sparse", &horon::Options::sparse);
  add_option("hierarchical", &horon::Options::hierarchical);
  add_option("carrier", &horon::Options::carrier);
  add_option("host_id", &horon::Options::host_id);
  options.def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def_property(
          "global_ranks_in_group",
          [](const BackendOptions& self) { return self.global_ranks_in_group; },
          [](BackendOptions& self, std::vector<uint64_t> ranks) {
            self.global_ranks_in_group = std::move(ranks);
          })
      .def_property(
          "group_name", [](const BackendOptions& self) { return self.group_name; },
          [](BackendOptions& self, std::string value) { self.group_name = std::move(value); })
      .def_property(
          "_timeout", [](const BackendOptions& self) { return self.timeout; },
          [](BackendOptions& self, std::chrono::milliseconds value) { self.timeout = value; })
      .def("__copy__",
           [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def("__deepcopy__", [](const BackendOptions& self, const py::dict&) {
        return c10::make_intrusive<BackendOptions>(self);
      });

  py::class_<HoronBackend, c10d::Backend, c10::intrusive_ptr<HoronBackend>>(module, "HoronBackend")
      .def_property_readonly("options", &HoronBackend::options)
      .def_property_readonly(
          "is_shared", &HoronBackend::is_shared,
          "True when all ranks share memory; False where bytes go over a network.")
      .def_property_readonly("transport", &HoronBackend::transport,
                             "How collectives travel: 'shared memory'; between hosts 'tcp' or "
                             "'gloo', with 'hosts, ' in front where ranks of one host share "
                             "memory.")
      .def(
          "all_reduce_",
          [](HoronBackend& self, const at::Tensor& tensor, std::string_view op) {
            self.all_reduce_blocking(tensor, reduce_op_named(op));
          },
          py::arg("tensor"), py::arg("op") = "sum", NoGil())
      .def("ended_ranks", &HoronBackend::ended_ranks, py::call_guard<GilReleased>())
      .def("prepare_shrink", &HoronBackend::prepare_shrink, py::arg("ranks_to_exclude"),
           py::arg("timeout"), NoGil())
      .def("give_up", &HoronBackend::give_up, py::arg("reason"), NoGil())
      .def("get_error", &HoronBackend::getError, NoGil())
      .def("_get_sequence_number_for_group", &HoronBackend::getSequenceNumberForGroup, NoGil())
      .def(
          "split",
          [](HoronBackend& self, const c10::intrusive_ptr<c10d::Store>& store,
             const std::vector<int>& ranks,
             const c10::intrusive_ptr<BackendOptions>& options) -> py::object {
            c10::intrusive_ptr<c10d::Backend> part;
            {
              const GilReleased no_gil;
              part = self.split(store, ranks, options);
            }
            return part ? py::cast(part) : py::none();
          },
          py::arg("store"), py::arg("ranks"), py::arg("options") = nullptr)
      .def(
          "perform_nocolor_split", [](HoronBackend&, const py::object&) {},
          "Nothing to do: only members of a split take part in it.");
#if HORON_HAS_RECONFIGURE
  const py::class_<ReconfigurableBackend, HoronBackend, c10::intrusive_ptr<ReconfigurableBackend>>
      reconfigurable(module, "ReconfigurableBackend");
#endif

  module.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("options"), py::arg("make_gloo"), py::arg("is_empty") = false);
  module.def(
      "shutdown_all",
      [](std::chrono::milliseconds drain) { LiveGroups::instance().shutdown_all(drain); },
      py::arg("drain"), NoGil());
  module.def(
      "check_alive",
      [](const std::vector<int>& global_ranks, const std::string& what) {
        try {
          LiveGroups::instance().check_alive(global_ranks, what, /*elsewhere=*/true);
        } catch (...) {
          rethrow_translated();
        }
      },
      py::arg("global_ranks"), py::arg("what"), NoGil());
  module.def("find_watch_posts", &horon::find_watch_posts);
  module.def(
      "ask_watch_post",
      [](std::uint64_t post, std::chrono::milliseconds timeout) {
        std::optional<std::pair<pid_t, std::optional<std::string>>> answered;
        if (auto answer = horon::ask(post, horon::Deadline::after(timeout))) {
          answered.emplace(answer->pid, std::move(answer->text));
        }
        return answered;
      },
      py::arg("post"), py::arg("timeout"), py::call_guard<GilReleased>());
  module.def(
      "call_roll",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout, const py::object& find_lost) {
        const GilReleased no_gil;
        return call_roll(store, rank, size, timeout, [&find_lost] {
          const py::gil_scoped_acquire gil;
          const py::object lost = find_lost.is_none() ? py::none() : find_lost();
          if (!lost.is_none()) {
            throw horon::PeerLostError(lost.cast<std::string>());
          }
        });
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
      py::arg("find_lost") = py::none());
  module.def("active_instruction_set", &horon::active_instruction_set);

  module.def(
      "empty_in_arena",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype) {
        return empty_in_arena(sizes, dtype);
      },
      py::arg("sizes"), py::arg("dtype"), NoGil());
  module.def("empty_like_in_arena", &empty_like_in_arena, py::arg("like"), py::arg("dtype"),
             NoGil());
  module.def(
      "is_in_arena", [](const at::Tensor& tensor) { return is_in_arena(tensor); },
      py::arg("tensor"));
  module.def("result_in_arena", &result_in_arena, py::arg("tensor"), py::call_guard<GilReleased>());
  module.def("expect_gradients", &expect_gradients, py::arg("bytes"));
  module.def("forget_gradients", &forget_gradients, py::arg("bytes"));
  module.def("arena_statistics", [] {
    const horon::ArenaStatistics now = arena_statistics();
    py::dict numbers;
    numbers["budget_bytes"] = now.budget_bytes;
    numbers["used_bytes"] = now.used_bytes;
    numbers["reserved_bytes"] = now.reserved_bytes;
    numbers["quarantined_bytes"] = now.quarantined_bytes;
    return numbers;
  });
#ifdef HORON_CUDA
  module.def(
      "cuda_pack",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& buffer, double factor) {
        pack_on_device(horon::PackDirection::kPack, tensors, buffer, factor);
      },
      py::arg("tensors"), py::arg("buffer"), py::arg("factor") = 1.0, NoGil());
  module.def(
      "cuda_unpack",
      [](const at::Tensor& buffer, const std::vector<at::Tensor>& tensors, double factor) {
        pack_on_device(horon::PackDirection::kUnpack, tensors, buffer, factor);
      },
      py::arg("buffer"), py::arg("tensors"), py::arg("factor") = 1.0, NoGil());
  module.def("nccl_version", [] { return nccl_api().version(); });
#endif
  module.def("has_gpu_parts", &has_gpu_parts);
  bind_named_engine(module);
  bind_gradients(module);
  shorten_operator_calls();
  py::class_<DdpParts, std::shared_ptr<DdpParts>>(module, "DdpParts")
      .def("set_lending", &DdpParts::set_lending, py::arg("is_lending"), py::arg("may_average"))
      .def_property_readonly("n_made", &DdpParts::n_made);
  py::enum_<DdpGradients>(module, "DdpGradients")
      .value("VIEWS", DdpGradients::kViews)
      .value("OWN", DdpGradients::kOwn)
      .value("COPIED", DdpGradients::kCopied);
  py::class_<OwnGradients, std::shared_ptr<OwnGradients>>(module, "OwnGradients")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"))
      .def_static("are_shared", &OwnGradients::are_shared, py::arg("parameters"))
      .def("watch", &OwnGradients::watch)
      .def("begin_forward", &OwnGradients::begin_forward)
      .def("end_rebuild", &OwnGradients::end_rebuild);
  module.def("register_ddp_arena_hook", &register_ddp_arena_hook, py::arg("reducer"),
             py::arg("group"), py::arg("gradients"), py::arg("own"));
}
