#include "collective.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "copy_into.h"
#include "device_side.h"
#include "tensor_memory.h"

namespace horon::torch_backend {
namespace {

// True unless every element provably has memory of its own: with the dimensions ordered by stride,
// each stride must step over all of the smaller ones. (ATen answers only the easy cases.)
bool may_overlap(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // (stride, size)
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) {
      dimensions.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;  // of the dimensions so far, in elements from the first
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) {
      return true;
    }
    reach += stride * (size - 1);
  }
  return false;
}

at::Tensor make_stand_in(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().requires_grad(false),
                   at::MemoryFormat::Contiguous);
}

void note_device(Collective& collective, const at::Tensor& tensor) {
  const at::Device device = tensor.device();
  TORCH_CHECK_VALUE(!collective.device || *collective.device == device,
                    "horon: one call has tensors on ", collective.device.value_or(device),
                    " and on ", device, "; move them to one device first.");
  collective.device = device;
}

Span writable_memory_of(const at::Tensor& tensor) { return {data_of(tensor), tensor.nbytes()}; }

}  // namespace

ConstSpan memory_of(const at::Tensor& tensor) {
  const Span memory = writable_memory_of(tensor);
  return {memory.data, memory.bytes};
}

bool is_plain_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && tensor.is_cpu() &&
         is_plain(tensor) && has_memory(tensor);
}

void Collective::prepare() {
  if (later != nullptr) {
    later->prepare();
  }
  if (copy_in.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (auto& [stand_in, user_tensor] : copy_in) {
    copy_into(stand_in, user_tensor.detach());
  }
}

void Collective::run(FunctionRef<void(const Request&)> run_one) {
  prepare();
  std::size_t made = 0;
  for (const Request& request : requests) {
    if (maker && maker->is_mine()) {
      made += request.outputs[0].bytes;
      maker->make_until(made);
    }
    run_one(request);
  }
  if (later != nullptr) {
    for (const Request& request : later->next()) {
      run_one(request);
    }
  }
}

void Collective::finish() {
  if (later != nullptr) {
    later->finish();
  }
  if (copy_back.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (const auto& [user_tensor, stand_in] : copy_back) {
    copy_into(user_tensor.detach(), stand_in);
  }
}

void check_tensor(const at::Tensor& tensor, OpKind kind) {
  TORCH_CHECK(tensor.defined(), "horon: ", name(kind), ": expected a tensor, got None.");
  TORCH_CHECK(tensor.layout() == c10::kStrided, "horon: ", name(kind),
              ": expected a dense tensor, got layout ", tensor.layout(), ". Call .to_dense() first",
              kind == OpKind::kAllReduce && tensor.is_cpu()
                  ? "; or, for sums of sparse COO tensors, as in DDP with sparse gradients, set "
                    "HORON_SPARSE=on for all ranks."
                  : ".");
  check_device(tensor, name(kind));
  check_memory(tensor, name(kind));
}

void check_device(const at::Tensor& tensor, const char* operation) {
  if (tensor.is_cpu() || (has_gpu_parts() && tensor.is_cuda())) {
    return;
  }
  TORCH_CHECK(!tensor.is_cuda(), "horon: ", operation, ": got a tensor on ", tensor.device(),
              ", and ", how_to_get_gpu_parts());
  TORCH_CHECK(false, "horon: ", operation, ": expected a CPU or CUDA tensor, got one on ",
              tensor.device(), ". Move it to the CPU first.");
}

void check_writable(const at::Tensor& tensor, OpKind kind) {
  check_tensor(tensor, kind);
  check_elements_apart(tensor, name(kind));
}

void check_elements_apart(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK(!may_overlap(tensor), "horon: ", operation,
              ": elements of an output tensor of sizes ", tensor.sizes(), " and strides ",
              tensor.strides(), " share memory. Call .contiguous() or .clone() first.");
}

ConstSpan stage_input(Collective& collective, const at::Tensor& tensor) {
  note_device(collective, tensor);
  if (is_plain(tensor)) {
    collective.kept_alive.push_back(tensor);
    return memory_of(tensor);
  }
  const at::Tensor stand_in = make_stand_in(tensor);
  collective.copy_in.emplace_back(stand_in, tensor);
  return memory_of(stand_in);
}

Span stage_output(Collective& collective, const at::Tensor& tensor, bool keep_contents) {
  if (is_plain(tensor)) {
    note_device(collective, tensor);
    collective.kept_alive.push_back(tensor);
    return writable_memory_of(tensor);
  }
  return stage_output_apart(collective, tensor, keep_contents);
}

Span stage_output_apart(Collective& collective, const at::Tensor& tensor, bool keep_contents) {
  note_device(collective, tensor);
  const at::Tensor stand_in = make_stand_in(tensor);
  if (keep_contents) {
    collective.copy_in.emplace_back(stand_in, tensor);
  }
  collective.copy_back.emplace_back(tensor, stand_in);
  return writable_memory_of(stand_in);
}

}  // namespace horon::torch_backend
