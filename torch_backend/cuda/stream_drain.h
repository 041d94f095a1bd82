// The host waits for streams: what a barrier does before the hosts meet.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <vector>

#include "core/deadline.h"

namespace horon::torch_backend {

// Those that are current on the GPU that is current and on `device_ids`, of the GPUs that this
// process has used; none where it has used none, and then CUDA is not touched: nor in a child that
// was forked from one that had, where CUDA does not work. Throws where a GPU with that number does
// not exist.
std::vector<c10::cuda::CUDAStream> current_streams(const std::vector<std::int64_t>& device_ids);

// Blocks until what the streams hold now has run. Streams that are captured hold nothing: what is
// queued there runs with the graph. Captures of other threads go on. Throws DistBackendError when
// the time is over, and what Ctrl-C raises.
void drain_streams(const std::vector<c10::cuda::CUDAStream>& streams, const Deadline& deadline);

}  // namespace horon::torch_backend
