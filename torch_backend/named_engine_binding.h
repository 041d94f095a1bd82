// horon._C.NamedEngine.
#pragma once

#include <pybind11/pybind11.h>

namespace horon::torch_backend {

void bind_named_engine(pybind11::module_& module);

}  // namespace horon::torch_backend
