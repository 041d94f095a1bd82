// Copies between the user's tensors and stand-ins.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace horon::torch_backend {

// Requires that autograd is off. Inference tensors may be changed in inference mode only, which
// belongs to the thread that made them, not to the one that runs the operation.
inline void copy_into(const at::Tensor& to, const at::Tensor& from) {
  std::optional<c10::InferenceMode> mode;
  if (to.is_inference()) {
    mode.emplace();
  }
  to.copy_(from);
}

}  // namespace horon::torch_backend
