#include "gradient_pack.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace horon::torch_backend {
namespace {

// Whether memory can be copied as it is.
bool has_same_layout(const at::Tensor& from, const at::Tensor& to) {
  return from.is_cpu() && to.is_cpu() && from.scalar_type() == to.scalar_type() &&
         from.strides() == to.strides() && from.is_non_overlapping_and_dense() && !from.is_neg() &&
         !from.is_conj();
}

}  // namespace

std::vector<std::int64_t> pack_gradients(const std::vector<at::Tensor>& parameters,
                                         const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(parameters.size() == views.size(), "horon: ", parameters.size(),
                    " parameters but ", views.size(), " views.");
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> others;
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
      if (view.numel() > 0) {
        std::memcpy(view.mutable_data_ptr(), gradient.const_data_ptr(), view.nbytes());
      }
    } else {
      view.copy_(gradient);
    }
    gradient = view;
  }
  return others;
}

}  // namespace horon::torch_backend
