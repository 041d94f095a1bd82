// Stands before CUDA's own for nccl.h, which asks for more than it needs.
#pragma once
#include <cuda_runtime_api.h>
