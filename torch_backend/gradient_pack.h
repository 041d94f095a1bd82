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

// Makes each view its parameter's gradient again, where something else has become that; a copy,
// where the parameter has another dtype or device by now.
void put_back_gradients(const std::vector<at::Tensor>& parameters,
                        const std::vector<at::Tensor>& views);

// Indices of the tensors whose data does not lie at these addresses any more.
std::vector<std::int64_t> find_moved(const std::vector<at::Tensor>& tensors,
                                     const std::vector<std::uintptr_t>& addresses);

}  // namespace horon::torch_backend
