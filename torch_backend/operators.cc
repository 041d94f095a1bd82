// torch.ops.horon: collectives as operators of PyTorch, for callers that count microseconds and for
// torch.compile. They block, return nothing and know no autograd.

#include "operators.h"

#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <string>
#include <utility>

namespace horon::torch_backend {
namespace {

constexpr std::array<std::pair<std::string_view, c10d::ReduceOp::RedOpType>, 8> kOps = {{
    {"sum", c10d::ReduceOp::SUM},
    {"avg", c10d::ReduceOp::AVG},
    {"product", c10d::ReduceOp::PRODUCT},
    {"min", c10d::ReduceOp::MIN},
    {"max", c10d::ReduceOp::MAX},
    {"band", c10d::ReduceOp::BAND},
    {"bor", c10d::ReduceOp::BOR},
    {"bxor", c10d::ReduceOp::BXOR},
}};

// The group that this thread used last. A name may come again after its group was destroyed.
struct LastGroup {
  std::string name;
  c10::weak_intrusive_ptr<c10d::Backend> backend =
      c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>());
};

// The backend of a group of that name if it is horon's, unwrapped; else null.
c10::intrusive_ptr<c10d::Backend> find_horon(std::string_view group_name) {
  thread_local LastGroup last;
  if (last.name == group_name) {
    auto known = last.backend.lock();
    if (known && static_cast<HoronBackend&>(*known).is_open()) {
      return known;
    }
  }
  const auto group = c10d::resolve_process_group(std::string(group_name));
  auto backend = group->getBackend(c10::DeviceType::CPU);
  if (dynamic_cast<HoronBackend*>(backend.get()) == nullptr) {
    return {};
  }
  last.name = group_name;
  last.backend = c10::weak_intrusive_ptr<c10d::Backend>(backend);
  return backend;
}

void all_reduce_(const at::Tensor& tensor, std::string_view op, std::string_view group_name) {
  if (all_reduce_in_group(tensor, op, group_name)) {
    return;
  }
  // Wrapped for TORCH_DISTRIBUTED_DEBUG=DETAIL, or another backend: the same result.
  const auto group = c10d::resolve_process_group(std::string(group_name));
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op_named(op);
  options.asyncOp = false;
  if (const auto work = group->allreduce(tensors, options)) {
    work->wait();
  }
}

void trace_all_reduce_(const at::Tensor& /*tensor*/, std::string_view op,
                       std::string_view /*group_name*/) {
  reduce_op_named(op);
}

}  // namespace

bool all_reduce_in_group(const at::Tensor& tensor, std::string_view op,
                         std::string_view group_name) {
  const c10d::ReduceOp reduce_op = reduce_op_named(op);
  const auto backend = find_horon(group_name);
  if (!backend) {
    return false;
  }
  static_cast<HoronBackend&>(*backend).all_reduce_blocking(tensor, reduce_op);
  return true;
}

c10d::ReduceOp reduce_op_named(std::string_view name) {
  for (const auto& [known, op] : kOps) {
    if (known == name) {
      return op;
    }
  }
  TORCH_CHECK_VALUE(false, "horon: all_reduce_: expected op to be one of sum, avg, product, min, ",
                    "max, band, bor, bxor; got '", name, "'.");
}

}  // namespace horon::torch_backend

TORCH_LIBRARY(horon, library) {
  library.def("all_reduce_(Tensor(a!) tensor, str op, str group_name) -> ()",
              {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(horon, CPU, library) {
  library.impl("all_reduce_",
               [](const at::Tensor& tensor, std::string_view op, std::string_view group_name) {
                 horon::torch_backend::all_reduce_(tensor, op, group_name);
               });
}

TORCH_LIBRARY_IMPL(horon, CUDA, library) {
  library.impl("all_reduce_",
               [](const at::Tensor& tensor, std::string_view op, std::string_view group_name) {
                 horon::torch_backend::all_reduce_(tensor, op, group_name);
               });
}

TORCH_LIBRARY_IMPL(horon, Meta, library) {
  library.impl("all_reduce_",
               [](const at::Tensor& tensor, std::string_view op, std::string_view group_name) {
                 horon::torch_backend::trace_all_reduce_(tensor, op, group_name);
               });
}
