#include "cuda/fusion_policy.h"

#include <algorithm>
#include <utility>

#include "core/round_up.h"

namespace horon {
namespace {

constexpr double kTimesThroughMemory = 4;  // see Note [What fusion costs]

bool pays(const FusionBatch& batch, const FusionCost& cost) {
  const double saved = static_cast<double>(batch.tensors.size() - 1) * cost.seconds_per_call;
  const double spent = 2 * cost.seconds_per_launch + kTimesThroughMemory *
                                                         static_cast<double>(batch.bytes) /
                                                         cost.bytes_per_second;
  return saved > spent;
}

}  // namespace

std::uint64_t largest_fused_bytes(const FusionCost& cost) {
  const double bytes = cost.seconds_per_call * cost.bytes_per_second / kTimesThroughMemory;
  return std::min(static_cast<std::uint64_t>(bytes), cost.buffer_bytes);
}

FusionDecision decide_fusion(const std::vector<FusionTensor>& tensors, const FusionCost& cost) {
  const std::uint64_t largest = largest_fused_bytes(cost);
  std::vector<FusionBatch> filled;
  std::vector<std::size_t> open;  // indices into `filled`, one for each kind: few
  FusionDecision decision;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const FusionTensor& tensor = tensors[i];
    if (tensor.bytes == 0 || tensor.bytes > largest) {
      decision.direct.push_back(i);
      continue;
    }
    auto of_kind = std::find_if(open.begin(), open.end(), [&](std::size_t batch) {
      return filled[batch].kind == tensor.kind;
    });
    if (of_kind == open.end()) {
      of_kind = open.insert(open.end(), filled.size());
      filled.emplace_back().kind = tensor.kind;
    }
    if (round_up(filled[*of_kind].bytes, kFusionAlignment) + tensor.bytes > cost.buffer_bytes) {
      *of_kind = filled.size();
      filled.emplace_back().kind = tensor.kind;
    }
    FusionBatch& batch = filled[*of_kind];
    const std::uint64_t offset = round_up(batch.bytes, kFusionAlignment);
    batch.tensors.push_back(i);
    batch.offsets.push_back(offset);
    batch.bytes = offset + tensor.bytes;
  }
  for (FusionBatch& batch : filled) {
    if (pays(batch, cost)) {
      decision.batches.push_back(std::move(batch));
    } else {
      decision.direct.insert(decision.direct.end(), batch.tensors.begin(), batch.tensors.end());
    }
  }
  std::sort(decision.direct.begin(), decision.direct.end());
  return decision;
}

}  // namespace horon
