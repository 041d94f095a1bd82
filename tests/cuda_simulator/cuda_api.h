// CUDA's runtime API as declarations to be defined here; what they declare is exported.
#pragma once

#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>
#pragma GCC visibility pop

#define HORON_SIMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
