// The pack kernel by itself: for benchmarks, and for who packs tensors of his own.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "cuda/pack_plan.h"

namespace horon::torch_backend {

// Copies between the tensors and `buffer`, where they lie one after the other on boundaries of
// kFusionAlignment bytes, on the current stream; every element times `factor`. All are contiguous,
// on one GPU, of one dtype. Throws ValueError.
void pack_on_device(PackDirection direction, const std::vector<at::Tensor>& tensors,
                    const at::Tensor& buffer, double factor);

}  // namespace horon::torch_backend
