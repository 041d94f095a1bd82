// Whether a gradient is, but for being another tensor, what lies in a place of a bucket.
#pragma once

#include <ATen/core/Tensor.h>

namespace horon::torch_backend {

// Where it begins; null: nowhere.
inline const void* address_of(const at::Tensor& gradient) {
  return gradient.defined() && gradient.has_storage() ? gradient.const_data_ptr() : nullptr;
}

// Same memory, layout and meaning, so that the place, a tensor, can stand for it.
inline bool lies_in_place(const at::Tensor& gradient, const at::Tensor& place) {
  return gradient.defined() && gradient.device() == place.device() &&
         gradient.layout() == c10::kStrided && gradient.has_storage() &&
         gradient.const_data_ptr() == place.const_data_ptr() &&
         gradient.scalar_type() == place.scalar_type() && gradient.sizes() == place.sizes() &&
         gradient.strides() == place.strides() && !gradient.is_conj() && !gradient.is_neg() &&
         !gradient.requires_grad();
}

}  // namespace horon::torch_backend
