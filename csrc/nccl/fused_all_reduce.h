// All-reduces of several tensors as one, through the fusion buffer. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/request.h"
#include "cuda/fusion_policy.h"
#include "cuda/pack_plan.h"
#include "nccl/nccl_plan.h"

namespace horon {

// In this order, on one stream.
struct FusedAllReduce {
  std::vector<PackLaunch> pack;
  NcclCall call;  // in place, in the buffer
  std::vector<PackLaunch> unpack;
};

struct FusedPlace {
  int n_ranks = 1;
  Float8 float8 = Float8::kNone;  // of requests whose dtype is kOpaque
  std::byte* buffer = nullptr;    // device memory of FusionBatch::bytes, aligned to 256
};

// What decide_fusion needs to know about the requests, which are all-reduces.
std::vector<FusionTensor> fusion_tensors(const std::vector<Request>& requests);

// Floats are averaged, and scaled for PREMUL_SUM, while they are packed and unpacked, in float32:
// NCCL rounds the factor to the tensors' type, and 1/3 is 0.2 % off in bfloat16.
// Throws UsageError for what NCCL can not reduce.
FusedAllReduce plan_fused_all_reduce(const std::vector<Request>& requests, const FusionBatch& batch,
                                     const FusedPlace& place);

}  // namespace horon
