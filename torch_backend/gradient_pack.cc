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
         from.sizes() == to.sizes() && from.strides() == to.strides() &&
         from.is_non_overlapping_and_dense() && !from.is_neg() && !from.is_conj();
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

bool needs_only_a_copy(const at::Tensor& gradient) {
  return gradient.layout() == c10::kStrided && !gradient.requires_grad();
}

// Without elements there may be no memory.
bool can_copy_bytes(const at::Tensor& gradient, const at::Tensor& view) {
  return view.is_cpu() && view.numel() > 0 && has_same_layout(gradient, view);
}

void copy_bytes(const at::Tensor& gradient, const at::Tensor& view) {
  std::memcpy(view.mutable_data_ptr(), gradient.const_data_ptr(), view.nbytes());
}

}  // namespace

GradientPack::GradientPack(const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(parameters.size() == views.size(), "horon: ", parameters.size(),
                    " parameters but ", views.size(), " views.");
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    places_.push_back({parameters[i], views[i].detach(), views[i]});
  }
}

void GradientPack::Place::renew_view() {
  if (view.const_data_ptr() != home.const_data_ptr()) {
    view = home.detach();
  }
}

void GradientPack::move_early(std::size_t index) {
  Place& place = places_.at(index);
  at::Tensor& gradient = place.parameter.mutable_grad();
  if (!gradient.defined() || gradient.is_same(place.view) || !needs_only_a_copy(gradient)) {
    return;
  }
  place.renew_view();
  if (can_copy_bytes(gradient, place.view)) {
    copy_bytes(gradient, place.view);
    gradient = place.view;
  }
}

std::vector<std::int64_t> GradientPack::pack() {
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> others;
  DeviceCopies on_device;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    place.renew_view();
    const at::Tensor& view = place.view;
    at::Tensor& gradient = place.parameter.mutable_grad();
    if (gradient.is_same(view)) {
      continue;
    }
    if (!gradient.defined()) {
      view.zero_();
    } else if (!needs_only_a_copy(gradient)) {
      others.push_back(static_cast<std::int64_t>(i));
      continue;
    } else if (can_copy_bytes(gradient, view)) {
      copy_bytes(gradient, view);
    } else if (!has_same_layout(gradient, view) || !on_device.add(gradient, view)) {
      view.copy_(gradient);
    }
    gradient = view;
  }
  on_device.run();
  return others;
}

void GradientPack::put_back() {
  const at::NoGradGuard no_grad;
  for (Place& place : places_) {
    place.renew_view();
    at::Tensor& gradient = place.parameter.mutable_grad();
    const at::Tensor& parameter = place.parameter;
    const at::Tensor& view = place.view;
    if (parameter.scalar_type() != view.scalar_type() || parameter.device() != view.device()) {
      gradient = view.to(parameter.device(), parameter.scalar_type());
    } else if (!gradient.is_same(view)) {
      gradient = view;
    }
  }
}

}  // namespace horon::torch_backend
