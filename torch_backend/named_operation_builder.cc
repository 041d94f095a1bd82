#include "named_operation_builder.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "copy_into.h"
#include "core/add_up_to.h"
#include "core/span_index.h"
#include "device_side.h"
#include "dtype_bridge.h"
#include "named/adasum.h"
#include "named_cuda.h"
#include "nccl/named_batch_plan.h"
#include "reduce/reduce.h"
#include "tensor_memory.h"

namespace horon::torch_backend {
namespace {

void check_names(NamedKind kind, std::size_t tensors, const std::vector<std::string>& names) {
  TORCH_CHECK_VALUE(tensors > 0, "horon: ", name(kind), ": expected at least one tensor.");
  TORCH_CHECK_VALUE(names.size() == tensors, "horon: ", name(kind), ": ", tensors, " tensors but ",
                    names.size(), " names.");
  for (const std::string& text : names) {
    TORCH_CHECK_VALUE(!text.empty(), "horon: ", name(kind), ": a tensor needs a name.");
  }
}

void check(NamedKind kind, const at::Tensor& tensor, const std::string& text) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == c10::kStrided, "horon: ", name(kind),
                    " '", text, "': expected a dense tensor.");
  check_memory(tensor, name(kind));
  if (tensor.is_cpu()) {
    return;
  }
  TORCH_CHECK_VALUE(tensor.is_cuda(), "horon: ", name(kind), " '", text, "': got a tensor on ",
                    tensor.device(), ", expected a CPU or CUDA tensor.");
  TORCH_CHECK_VALUE(has_gpu_parts(), "horon: ", name(kind), " '", text, "': got a tensor on ",
                    tensor.device(), ", but ", how_to_get_gpu_parts());
}

DeviceKind kind_of(const at::Tensor& tensor) {
  return tensor.is_cpu() ? DeviceKind::kCpu : DeviceKind::kCuda;
}

NamedOperation::Tensor view_of(const at::Tensor& input, const at::Tensor& written) {
  NamedOperation::Tensor view;
  view.input = {data_of(input), input.nbytes()};
  if (written.defined()) {
    view.output = {data_of(written), written.nbytes()};
  }
  return view;
}

at::Tensor stand_in_of(const at::Tensor& output) {
  return at::empty(output.sizes(), output.options().requires_grad(false),
                   at::MemoryFormat::Contiguous);
}

class Builder {
 public:
  Builder(NamedKind kind, const SetView& set) {
    TORCH_CHECK_VALUE(std::binary_search(set.ranks.begin(), set.ranks.end(), set.rank),
                      "horon: ", name(kind), ": rank ", set.rank, " is not in process set ", set.id,
                      ".");
    request_->kind = kind;
    request_->process_set = set.id;
  }

  NamedRequest& request() { return *request_; }

  // `output` may be undefined: it is made when its size is known.
  void add(const at::Tensor& tensor, const at::Tensor& output, const std::string& text,
           bool any_rows = false) {
    const NamedKind kind = request_->kind;
    check(kind, tensor, text);
    if (request_->tensors.empty()) {
      request_->device = kind_of(tensor);
    }
    TORCH_CHECK(request_->device == kind_of(tensor), "horon: ", name(kind), " '", text,
                "': a group has CPU and CUDA tensors; expected all on GPUs, or none.");
    TensorSpec spec;
    spec.name = text;
    spec.dtype = to_dtype(tensor.scalar_type());
    spec.type_code = static_cast<std::uint8_t>(tensor.scalar_type());
    spec.element_bytes = static_cast<std::uint8_t>(tensor.element_size());
    spec.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
    if (any_rows) {
      TORCH_CHECK_VALUE(tensor.dim() > 0, "horon: ", name(kind), " '", text,
                        "': expected a tensor with at least one dimension.");
      operation_->rows.push_back(spec.shape[0]);
      spec.shape[0] = -1;
    } else {
      operation_->rows.push_back(0);
    }
    request_->tensors.push_back(std::move(spec));
    const at::NoGradGuard no_grad;
    operation_->inputs.push_back(
        is_plain(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous());
    const bool needs_stand_in = output.defined() && !is_plain(output);
    const at::Tensor written = needs_stand_in ? stand_in_of(output) : output;
    operation_->outputs.push_back(output);
    operation_->written.push_back(written);
    operation_->tensors.push_back(view_of(operation_->inputs.back(), written));
  }

  void add_output(const at::Tensor& tensor, const at::Tensor& output, const std::string& text) {
    TORCH_CHECK_VALUE(output.defined() && output.sizes() == tensor.sizes() &&
                          output.scalar_type() == tensor.scalar_type() &&
                          output.device() == tensor.device(),
                      "horon: ", name(request_->kind), " '", text,
                      "': the output must have the input's shape, dtype and device.");
    add(tensor, output, text);
  }

  // The tensors of a group may travel one after another. Where one's output shares memory with
  // another's input, no output changes before all inputs have been read.
  void separate_outputs() {
    TensorOperation& operation = *operation_;
    if (operation.tensors.size() < 2) {
      return;
    }
    PerRank<ConstSpan> inputs;
    for (const NamedOperation::Tensor& view : operation.tensors) {
      inputs.push_back(view.input);
    }
    const SpanIndex index(inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Span output = operation.tensors[i].output;
      if (index.any_overlap({output.data, output.bytes},
                            [i](std::size_t other) { return other != i; })) {
        operation.written[i] = stand_in_of(operation.outputs[i]);
        operation.tensors[i] = view_of(operation.inputs[i], operation.written[i]);
      }
    }
  }

  void set_reduction(const Reduced& how, int n_ranks) {
    const NamedKind kind = request_->kind;
    TORCH_CHECK_VALUE(how.op >= 0 && how.op < kNamedOpCount, "horon: ", name(kind),
                      ": unknown reduction ", how.op, ".");
    request_->op = static_cast<NamedOp>(how.op);
    request_->prescale = how.prescale;
    request_->postscale = how.postscale;
    request_->priority = how.priority;
    for (const TensorSpec& tensor : request_->tensors) {
      check_reducible(tensor, n_ranks);
    }
    if (request_->device == DeviceKind::kCuda && !is_reduced_on_devices()) {
      go_by_host();
    }
  }

  OperationPtr finish() {
    request_->keys = keys_of(*request_);
    operation_->request = request_;
    return operation_;
  }
  OperationPtr& operation() { return operation_; }

 private:
  bool is_reduced_on_devices() const {
    const NamedRequest& request = *request_;
    return std::all_of(request.tensors.begin(), request.tensors.end(), [&](const auto& tensor) {
      return is_reduced_on_device(tensor.dtype, request.op, request.prescale, request.postscale);
    });
  }

  // What a GPU can not reduce: waits for the inputs, and is an operation of the CPU from then on.
  void go_by_host() {
    const at::NoGradGuard no_grad;
    request_->device = DeviceKind::kCudaByHost;
    TensorOperation& operation = *operation_;
    for (std::size_t i = 0; i < operation.inputs.size(); ++i) {
      operation.inputs[i] = operation.inputs[i].detach().to(at::kCPU);
      operation.written[i] = at::empty(operation.outputs[i].sizes(), operation.inputs[i].options());
      operation.tensors[i] = view_of(operation.inputs[i], operation.written[i]);
    }
  }

  void check_reducible(const TensorSpec& tensor, int n_ranks) const {
    const NamedRequest& request = *request_;
    if (request.op == NamedOp::kAdasum) {
      TORCH_CHECK_VALUE(has_adasum(tensor.dtype), "horon: Adasum '", tensor.name,
                        "': unsupported dtype ", name(tensor.dtype),
                        "; it is defined for floating-point tensors.");
      TORCH_CHECK_VALUE(is_power_of_two(n_ranks), "horon: Adasum '", tensor.name,
                        "' needs a number of ranks that is a power of two, got ", n_ranks, ".");
      return;
    }
    static constexpr ReduceOp kOps[] = {ReduceOp::kAvg, ReduceOp::kSum, ReduceOp::kSum,
                                        ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
    const bool scales = request.prescale != 1.0 || request.postscale != 1.0;
    for (const ReduceOp op : {kOps[static_cast<int>(request.op)],
                              scales ? ReduceOp::kPremulSum : kOps[static_cast<int>(request.op)]}) {
      TORCH_CHECK_VALUE(is_reducible(tensor.dtype, op), "horon: ", name(request.kind), " '",
                        tensor.name, "': unsupported dtype: ", why_not_reducible(tensor.dtype, op));
    }
  }

  std::shared_ptr<NamedRequest> request_ = std::make_shared<NamedRequest>();
  OperationPtr operation_ = std::make_shared<TensorOperation>();
};

}  // namespace

TensorOperation::~TensorOperation() {
  if (cuda) {
    TensorList none;
    let_go(*this, none);
  }
}

bool TensorOperation::has_come() const { return !cuda || torch_backend::has_come(*cuda); }

Span TensorOperation::allocate(std::size_t index, std::int64_t rows) {
  std::vector<int64_t> sizes = inputs[index].sizes().vec();
  sizes[0] = rows;
  outputs[index] = at::empty(sizes, inputs[index].options().requires_grad(false));
  written[index] = outputs[index];
  return {data_of(outputs[index]), outputs[index].nbytes()};
}

TensorList TensorOperation::take_results() {
  const at::NoGradGuard no_grad;
  if (cuda) {
    await_on_stream(*this);
  }
  TensorList results;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].is_same(written[i])) {
      copy_into(outputs[i].detach(), written[i]);
    }
    results.push_back(outputs[i]);
  }
  if (request->kind == NamedKind::kAllToAll) {
    results.push_back(at::tensor(at::ArrayRef<int64_t>(received_splits), at::kLong));
  } else if (request->kind == NamedKind::kJoin) {
    results.push_back(at::full({1}, static_cast<int64_t>(value), at::kInt));
  }
  if (cuda) {
    let_go(*this, results);
  }
  inputs.clear();
  return results;
}

at::Tensor TensorOperation::take_result() {
  inputs.clear();
  return outputs.front();
}

OperationPtr named_allreduce(const SetView& set, const TensorList& tensors,
                             const TensorList& outputs, const std::vector<std::string>& names,
                             const Reduced& how) {
  check_names(NamedKind::kAllReduce, tensors.size(), names);
  TORCH_CHECK_VALUE(outputs.size() == tensors.size(), "horon: ALLREDUCE: ", tensors.size(),
                    " tensors but ", outputs.size(), " outputs.");
  Builder builder(NamedKind::kAllReduce, set);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    builder.add_output(tensors[i], outputs[i], names[i]);
  }
  builder.separate_outputs();
  builder.set_reduction(how, static_cast<int>(set.ranks.size()));
  return builder.finish();
}

OperationPtr named_allreduce_again(const RequestPtr& request, const at::Tensor& tensor,
                                   const at::Tensor& output) {
  const auto device =
      request->device == DeviceKind::kCpu ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
  const auto is_easy = [&](const at::Tensor& one) {
    return one.layout() == c10::kStrided && one.device().type() == device && is_plain(one) &&
           has_memory(one);
  };
  if (request->device == DeviceKind::kCudaByHost || !is_easy(tensor) ||
      (!output.is_same(tensor) &&
       !(is_easy(output) && output.sizes() == tensor.sizes() &&
         output.scalar_type() == tensor.scalar_type() && output.device() == tensor.device()))) {
    return nullptr;
  }
  auto operation = std::make_shared<TensorOperation>();
  operation->request = request;
  operation->returns_tensor = true;
  operation->rows.push_back(0);
  operation->inputs.push_back(tensor);
  operation->outputs.push_back(output);
  operation->written.push_back(output);
  operation->tensors.push_back(
      {{data_of(tensor), tensor.nbytes()}, {data_of(output), output.nbytes()}});
  return operation;
}

OperationPtr named_allgather(const SetView& set, const TensorList& tensors,
                             const std::vector<std::string>& names) {
  check_names(NamedKind::kAllGather, tensors.size(), names);
  Builder builder(NamedKind::kAllGather, set);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    builder.add(tensors[i], {}, names[i], true);
  }
  return builder.finish();
}

OperationPtr named_broadcast(const SetView& set, const at::Tensor& tensor, const at::Tensor& output,
                             int root, const std::string& name) {
  check_names(NamedKind::kBroadcast, 1, {name});
  Builder builder(NamedKind::kBroadcast, set);
  TORCH_CHECK_VALUE(std::binary_search(set.ranks.begin(), set.ranks.end(), root),
                    "horon: BROADCAST '", name, "': root rank ", root, " is not in process set ",
                    set.id, ".");
  builder.add_output(tensor, output, name);
  builder.request().root = root;
  return builder.finish();
}

OperationPtr named_alltoall(const SetView& set, const at::Tensor& tensor,
                            const std::optional<std::vector<std::int64_t>>& splits,
                            const std::string& name) {
  check_names(NamedKind::kAllToAll, 1, {name});
  Builder builder(NamedKind::kAllToAll, set);
  builder.add(tensor, {}, name, true);
  const auto n = static_cast<std::int64_t>(set.ranks.size());
  const std::int64_t rows = tensor.size(0);
  std::vector<std::int64_t> wanted;
  if (splits && !splits->empty()) {
    wanted = *splits;
    // Rows that are left over are sent to nobody, as in Horovod.
    const bool is_good = static_cast<std::int64_t>(wanted.size()) == n && fit_into(rows, wanted);
    TORCH_CHECK_VALUE(is_good, "horon: ALLTOALL '", name, "': splits must be ", n,
                      " numbers, none negative, that add up to at most the ", rows, " rows, got ",
                      at::ArrayRef<std::int64_t>(wanted), ".");
  } else {
    TORCH_CHECK_VALUE(rows % n == 0, "horon: ALLTOALL '", name, "': without splits the ", rows,
                      " rows must be divisible by the ", n, " ranks.");
    wanted.assign(static_cast<std::size_t>(n), rows / n);
  }
  builder.operation()->splits = std::move(wanted);
  return builder.finish();
}

OperationPtr named_reducescatter(const SetView& set, const TensorList& tensors,
                                 const std::vector<std::string>& names, const Reduced& how) {
  constexpr NamedKind kKind = NamedKind::kReduceScatter;
  check_names(kKind, tensors.size(), names);
  const auto op = static_cast<NamedOp>(how.op);
  // A RuntimeError, as Horovod's.
  TORCH_CHECK_NOT_IMPLEMENTED(op != NamedOp::kAdasum,
                              "horon: REDUCESCATTER: Adasum is not supported.");
  TORCH_CHECK_VALUE(op == NamedOp::kAverage || op == NamedOp::kSum,
                    "horon: REDUCESCATTER: only Average and Sum are supported.");
  Builder builder(kKind, set);
  const auto place = static_cast<int>(
      std::lower_bound(set.ranks.begin(), set.ranks.end(), set.rank) - set.ranks.begin());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(kKind, tensors[i], names[i]);
    TORCH_CHECK_VALUE(tensors[i].dim() > 0, "horon: REDUCESCATTER '", names[i],
                      "': expected a tensor with at least one dimension.");
    std::vector<int64_t> sizes = tensors[i].sizes().vec();
    sizes[0] = rows_of(sizes[0], place, static_cast<int>(set.ranks.size()));
    builder.add(tensors[i], at::empty(sizes, tensors[i].options().requires_grad(false)), names[i]);
  }
  builder.set_reduction(how, static_cast<int>(set.ranks.size()));
  return builder.finish();
}

OperationPtr named_signal(NamedKind kind, int process_set, const std::string& name,
                          const std::vector<int>& ranks, int root) {
  auto request = std::make_shared<NamedRequest>();
  request->kind = kind;
  request->process_set = process_set;
  request->root = root;
  request->ranks.assign(ranks.begin(), ranks.end());
  request->tensors.resize(1);
  request->tensors[0].name = name;
  auto operation = std::make_shared<TensorOperation>();
  operation->request = std::move(request);
  operation->tensors.resize(1);
  return operation;
}

}  // namespace horon::torch_backend
