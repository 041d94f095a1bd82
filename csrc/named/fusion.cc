#include "named/fusion.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace horon {
namespace {

// Only these gain from travelling together.
bool is_fusible(NamedKind kind) {
  return kind == NamedKind::kAllReduce || kind == NamedKind::kAllGather;
}

auto traits(const FusionItem& item) {
  const NamedRequest& request = *item.request;
  const TensorSpec& tensor = request.tensors[item.tensor];
  return std::make_tuple(request.process_set, request.kind, request.device, request.op,
                         request.prescale, request.postscale, tensor.dtype, tensor.type_code,
                         tensor.element_bytes);
}

struct OpenBatch {
  std::size_t index = 0;  // in the plan
  std::size_t bytes = 0;
  const FusionItem* like = nullptr;
};

}  // namespace

std::vector<Batch> plan_fusion(const std::vector<FusionItem>& items, const FusionOptions& options) {
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return items[a].request->priority < items[b].request->priority;
  });
  std::vector<Batch> plan;
  std::vector<OpenBatch> open;  // one for each kind of batch: few
  for (const std::size_t index : order) {
    const FusionItem& item = items[index];
    const std::size_t bytes = item.request->tensors[item.tensor].bytes();
    const std::size_t alone_bytes =
        item.request->device == DeviceKind::kCuda ? options.gpu_alone_bytes : options.alone_bytes;
    if (!is_fusible(item.request->kind) || bytes > alone_bytes || bytes > options.threshold_bytes) {
      plan.push_back({index});
      continue;
    }
    const auto batch = std::find_if(open.begin(), open.end(), [&](const OpenBatch& candidate) {
      return traits(*candidate.like) == traits(item);
    });
    if (batch != open.end() && batch->bytes + bytes <= options.threshold_bytes) {
      plan[batch->index].push_back(index);
      batch->bytes += bytes;
      continue;
    }
    const OpenBatch started{plan.size(), bytes, &item};
    plan.push_back({index});
    if (batch != open.end()) {
      *batch = started;
    } else {
      open.push_back(started);
    }
  }
  return plan;
}

}  // namespace horon
