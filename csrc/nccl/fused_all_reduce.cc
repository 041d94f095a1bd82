#include "nccl/fused_all_reduce.h"

#include <algorithm>

#include "core/error.h"
#include "nccl/scaling.h"

namespace horon {
namespace {

bool may_share_a_call(const Request& a, const Request& b) {
  return a.dtype == b.dtype && a.type_code == b.type_code && a.op == b.op && a.factor == b.factor;
}

// Types that the pack kernel can multiply.
bool is_scalable(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

Scaling scaling_of(const Request& request, int n_ranks) {
  if (is_scalable(request.dtype)) {
    if (request.op == ReduceOp::kAvg && request.dtype == DType::kFloat16) {
      return {ReduceOp::kSum, 1.0 / n_ranks, 1.0};  // the sum might be above 65504
    }
    if (request.op == ReduceOp::kAvg) {
      return {ReduceOp::kSum, 1.0, 1.0 / n_ranks};
    }
    if (request.op == ReduceOp::kPremulSum) {
      return {ReduceOp::kSum, request.factor, 1.0};
    }
  }
  return {request.op, 1.0, 1.0};
}

std::vector<PackTensor> pack_tensors(const std::vector<Request>& requests, const FusionBatch& batch,
                                     PackDirection direction) {
  std::vector<PackTensor> tensors;
  tensors.reserve(batch.tensors.size());
  for (std::size_t i = 0; i < batch.tensors.size(); ++i) {
    const Request& request = requests[batch.tensors[i]];
    const std::byte* memory =
        direction == PackDirection::kPack ? request.inputs[0].data : request.outputs[0].data;
    PackTensor tensor;
    tensor.address = reinterpret_cast<std::uint64_t>(memory);
    tensor.buffer_offset = batch.offsets[i];
    tensor.elements = request.count;
    tensor.dtype = request.dtype;
    tensor.buffer_dtype = request.dtype;
    tensors.push_back(tensor);
  }
  return tensors;
}

}  // namespace

std::vector<FusionTensor> fusion_tensors(const std::vector<Request>& requests) {
  std::vector<FusionTensor> tensors;
  tensors.reserve(requests.size());
  std::vector<const Request*> kinds;  // few
  for (const Request& request : requests) {
    auto like = std::find_if(kinds.begin(), kinds.end(),
                             [&](const Request* kind) { return may_share_a_call(*kind, request); });
    if (like == kinds.end()) {
      like = kinds.insert(kinds.end(), &request);
    }
    tensors.push_back({request.inputs[0].bytes, static_cast<std::uint32_t>(like - kinds.begin())});
  }
  return tensors;
}

FusedAllReduce plan_fused_all_reduce(const std::vector<Request>& requests, const FusionBatch& batch,
                                     const FusedPlace& place) {
  HORON_CHECK(!batch.tensors.empty() && place.buffer != nullptr,
              "fused all_reduce: expected tensors and a buffer, got ", batch.tensors.size(),
              " tensors.");
  const Request& first = requests[batch.tensors[0]];
  const Scaling scaling = scaling_of(first, place.n_ranks);
  const auto address = reinterpret_cast<std::uint64_t>(place.buffer);
  FusedAllReduce fused;
  fused.pack = plan_pack(PackDirection::kPack, pack_tensors(requests, batch, PackDirection::kPack),
                         address, scaling.before);
  fused.unpack =
      plan_pack(PackDirection::kUnpack, pack_tensors(requests, batch, PackDirection::kUnpack),
                address, scaling.after);
  fused.call.function = NcclFunction::kAllReduce;
  fused.call.send = place.buffer;
  fused.call.recv = place.buffer;
  fused.call.reduction =
      nccl_reduction(first.kind, first.dtype, place.float8, scaling.op, first.factor);
  fused.call.count = batch.bytes / element_bytes(fused.call.reduction.dtype);
  return fused;
}

}  // namespace horon
