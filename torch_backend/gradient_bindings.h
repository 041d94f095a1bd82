// What the DistributedOptimizer in Python uses for its gradients.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace horon::torch_backend {

// After bind_named_engine().
void bind_gradients(pybind11::module_& module);

}  // namespace horon::torch_backend
