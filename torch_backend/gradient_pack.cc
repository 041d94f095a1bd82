#include "gradient_pack.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstring>

#ifdef HORON_CUDA
#include "cuda/device_copies.h"
#endif

namespace horon::torch_backend {
namespace {

// Whether memory can be copied as it is.
bool has_same_layout(const at::Tensor& from, const at::Tensor& to) {
  return from.device() == to.device() && from.scalar_type() == to.scalar_type() &&
         from.strides() == to.strides() && from.is_non_overlapping_and_dense() && !from.is_neg() &&
         !from.is_conj();
}

// Copies within a GPU, which go together.
class DeviceCopies {
 public:
  bool add(const at::Tensor& from, const at::Tensor& to) {
#ifdef HORON_CUDA
    if (from.is_cuda() && (held_.empty() || held_.front().device() == from.device())) {
      copies_.push_back({reinterpret_cast<std::uint64_t>(from.const_data_ptr()),
                         reinterpret_cast<std::uint64_t>(to.mutable_data_ptr()), to.nbytes()});
      held_.push_back(from);
      return true;
    }
#endif
    (void)from;
    (void)to;
    return false;
  }

  void run() {
#ifdef HORON_CUDA
    if (!held_.empty()) {
      copy_on_device(copies_, held_.front().device());
    }
#endif
  }

 private:
#ifdef HORON_CUDA
  std::vector<ByteCopy> copies_;
  std::vector<at::Tensor> held_;  // their memory may be used again as soon as they are let go
#endif
};

}  // namespace

std::vector<std::int64_t> pack_gradients(const std::vector<at::Tensor>& parameters,
                                         const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(parameters.size() == views.size(), "horon: ", parameters.size(),
                    " parameters but ", views.size(), " views.");
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> others;
  DeviceCopies on_device;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& gradient = parameters[i].mutable_grad();
    const at::Tensor& view = views[i];
    if (gradient.is_same(view)) {
      continue;
    }
    if (!gradient.defined()) {
      view.zero_();
    } else if (gradient.layout() != c10::kStrided || gradient.requires_grad()) {
      others.push_back(static_cast<std::int64_t>(i));
      continue;
    } else if (has_same_layout(gradient, view)) {
      if (view.numel() > 0 && view.is_cpu()) {
        std::memcpy(view.mutable_data_ptr(), gradient.const_data_ptr(), view.nbytes());
      } else if (view.numel() > 0 && !on_device.add(gradient, view)) {
        view.copy_(gradient);
      }
    } else {
      view.copy_(gradient);
    }
    gradient = view;
  }
  on_device.run();
  return others;
}

void put_back_gradients(const std::vector<at::Tensor>& parameters,
                        const std::vector<at::Tensor>& views) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& gradient = parameters[i].mutable_grad();
    if (parameters[i].scalar_type() != views[i].scalar_type() ||
        parameters[i].device() != views[i].device()) {
      gradient = views[i].to(parameters[i].device(), parameters[i].scalar_type());
    } else if (!gradient.is_same(views[i])) {
      gradient = views[i];
    }
  }
}

std::vector<std::int64_t> find_moved(const std::vector<at::Tensor>& tensors,
                                     const std::vector<std::uintptr_t>& addresses) {
  std::vector<std::int64_t> moved;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (reinterpret_cast<std::uintptr_t>(tensors[i].const_data_ptr()) != addresses[i]) {
      moved.push_back(static_cast<std::int64_t>(i));
    }
  }
  return moved;
}

}  // namespace horon::torch_backend
