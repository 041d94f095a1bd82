// CUDA's last error, of this thread.
#pragma once

#include "cuda_api.h"

namespace horon::simulator {

// Remembers an error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t error);

}  // namespace horon::simulator
