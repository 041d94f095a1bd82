// The calls that scripts make by the thousand, past pybind11: its conversions of arguments would
// cost more than the rest of the call.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "named_engine_host.h"

namespace horon::torch_backend {

// The functions (allreduce, take) of an engine:
//   allreduce(tensor, output, name, op, prescale, postscale, process_set, will_wait) -> handle
//   take(handle) -> the result, or None for a handle that is unknown or was taken
// `internal_error` is the type of what is not the caller's fault.
pybind11::tuple make_named_calls(const std::shared_ptr<NamedEngineHost>& host,
                                 pybind11::handle internal_error);

}  // namespace horon::torch_backend
