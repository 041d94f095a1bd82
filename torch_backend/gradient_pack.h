// Small gradients, side by side in one buffer: moved there in C++, since a loop in Python would
// take longer than their reduction.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace horon::torch_backend {

// Copies each parameter's gradient into its view and makes the view the gradient; a missing one
// becomes zeros. Leaves those that are their views already. Returns the indices of gradients that
// need more than a copy (sparse ones, those with a graph), untouched.
std::vector<std::int64_t> pack_gradients(const std::vector<at::Tensor>& parameters,
                                         const std::vector<at::Tensor>& views);

}  // namespace horon::torch_backend
