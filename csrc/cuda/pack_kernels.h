// Packs the tensors of a batch into the fusion buffer, and unpacks them, on a stream.
#pragma once

#include <vector>

#include "cuda/handles.h"
#include "cuda/pack_plan.h"

namespace horon {

// Queues the launches that plan_pack made. Does not block the host, and may be captured into a
// graph: the addresses are part of it. Requires that the stream's device is current, and that all
// memory lives until the stream has come past. Throws CudaError.
void launch_pack(const std::vector<PackLaunch>& launches, StreamHandle stream);

// Has CUDA load the kernels on the current device now: at a first launch it may wait for what the
// GPU runs, and that may wait for other ranks. Throws CudaError.
void load_pack_kernels();

}  // namespace horon
