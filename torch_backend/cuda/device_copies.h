// Many copies within a GPU by one kernel.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "cuda/pack_plan.h"

namespace horon::torch_backend {

// On the device's current stream. Does not block the host; the memory has to live until the stream
// has come past.
void copy_on_device(const std::vector<ByteCopy>& copies, c10::Device device);

}  // namespace horon::torch_backend
