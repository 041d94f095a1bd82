// CudaGroup: how a batch gets onto a stream.

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "append.h"
#include "cuda/cuda_group.h"
#include "cuda/cuda_work.h"
#include "cuda/pack_kernels.h"
#include "cuda/stream.h"
#include "dtype_bridge.h"
#include "finished_work.h"
#include "group.h"
#include "nccl/fused_all_reduce.h"
#include "process_exit.h"
#include "tensor_memory.h"

namespace horon::torch_backend {
namespace {

using c10::cuda::CUDAStream;

at::Tensor scratch_on_current_stream(std::size_t bytes, c10::Device device) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

// Nearly always one list: a plan is for one kind of 8-bit floats.
std::vector<std::vector<Request>> by_float8(std::vector<Request>& requests) {
  std::vector<std::vector<Request>> lists;
  const auto is_as_first = [&](const Request& request) {
    return float8_of(request.type_code) == float8_of(requests.front().type_code);
  };
  if (!requests.empty() && std::all_of(requests.begin(), requests.end(), is_as_first)) {
    lists.push_back(std::move(requests));
    return lists;
  }
  for (Request& request : requests) {
    const Float8 kind = float8_of(request.type_code);
    auto alike = std::find_if(lists.begin(), lists.end(), [&](const std::vector<Request>& list) {
      return float8_of(list.front().type_code) == kind;
    });
    if (alike == lists.end()) {
      alike = lists.emplace(lists.end());
    }
    alike->push_back(std::move(request));
  }
  return lists;
}

// What the collectives' views point into, and what is copied from and to it.
std::vector<at::Tensor> take_memory_of(std::vector<Collective>& collectives) {
  std::vector<at::Tensor> kept;
  for (Collective& collective : collectives) {
    append(kept, collective.kept_alive);
    for (auto* copies : {&collective.copy_in, &collective.copy_back}) {
      for (auto& [to, from] : *copies) {
        kept.push_back(std::move(to));
        kept.push_back(std::move(from));
      }
    }
  }
  return kept;
}

}  // namespace

DeviceSide::WorkPtr CudaGroup::queue(CudaLane& lane, Batch batch, const DeviceCall& call) {
  const c10::cuda::CUDAGuard device_guard(lane.device());
  const CUDAStream caller = c10::cuda::getCurrentCUDAStream(lane.device());
  const CUDAStream& stream = call.is_async ? lane.stream() : caller;
  const bool is_captured = is_capturing(caller.stream());
  flush_batches(stream, is_captured);
  release_ended();
  if (stream != caller) {
    const EventPool::Lease begin = lane.events().acquire();
    begin->record(caller.stream());
    begin->block(stream.stream(), stream.device_index());
  }
  const Deadline deadline = Deadline::after(call.timeout);
  try {
    const c10::cuda::CUDAStreamGuard stream_guard(stream);
    for (Collective& collective : batch.collectives) {
      collective.prepare();
    }
    {
      const Awaited awaited{call.name(), call.sequence, deadline};
      const WatchedLaunch watched(*this, awaited, lane.device());
      launch(lane, batch, stream, awaited.text(), deadline);
    }
    for (Collective& collective : batch.collectives) {
      collective.finish();
    }
  } catch (...) {
    if (stream != caller) {
      // The stand-ins go, and are the caller's stream's memory: behind what was queued for them.
      const EventPool::Lease queued = lane.events().acquire();
      queued->record(stream.stream());
      queued->block(caller.stream(), caller.device_index());
    }
    throw;
  }
  last_sequence_.store(call.sequence, std::memory_order_relaxed);
  EventPool::Lease end = lane.events().acquire();
  end->record(stream.stream());

  std::vector<at::Tensor> kept;
  if (stream != caller) {
    kept = take_memory_of(batch.collectives);
  }
  const CudaOperation::Origin origin{call.name(), call.sequence, next_completion_key(), deadline};
  const auto operation = std::make_shared<CudaOperation>(
      origin, CudaOperation::Streams{caller, stream}, std::move(end), std::move(kept));
  if (is_captured) {
    lane.note_capture();
    // It runs when the graph does, as often as that does, and nobody tells: it counts as done.
    const CallOut call_out;
    hooks_->on_completion.call_all(operation->completion_key());
  } else {
    watch(operation);
  }
  if (!call.is_async && hooks_->on_completion.is_empty()) {
    return nullptr;  // Python then skips wait()
  }
  CudaWork::Origin work_origin;
  work_origin.rank = rank_;
  work_origin.op_type = call.op_type;
  work_origin.timeout = call.timeout;
  work_origin.is_captured = is_captured;
  work_origin.group = group_;
  return c10::make_intrusive<CudaWork>(work_origin, operation, std::move(batch.outputs));
}

void CudaGroup::launch(CudaLane& lane, Batch& batch, const CUDAStream& stream,
                       const std::string& operation, const Deadline& deadline) {
  std::vector<Request>& requests = batch.requests;
  if (requests.size() > 1) {
    launch_fused(lane, requests, stream, operation, deadline);
  }
  NcclPlan plan;
  // Memory of the stream: whoever gets it next uses it behind these calls.
  std::vector<at::Tensor> scratch;
  for (const std::vector<Request>& alike : by_float8(requests)) {
    NcclPlace place{lane.rank(), lane.n_ranks(), float8_of(alike.front().type_code), nullptr};
    if (const std::size_t bytes = scratch_bytes(alike, lane.n_ranks()); bytes > 0) {
      scratch.push_back(scratch_on_current_stream(bytes, stream.device()));
      place.scratch = data_of(scratch.back());
    }
    NcclPlan part = plan_nccl(alike, place);
    append(plan.before, part.before);
    append(plan.calls, part.calls);
    append(plan.after, part.after);
  }
  append(plan.calls, batch.messages);
  lane.transport().issue(plan, stream.stream(), operation, deadline);
}

void CudaGroup::launch_fused(CudaLane& lane, std::vector<Request>& requests,
                             const CUDAStream& stream, const std::string& operation,
                             const Deadline& deadline) {
  const auto is_reduction = [&](const Request& request) {
    // Of one rank's tensors nothing changes but by a factor: there is nothing to save.
    const bool does_something = lane.n_ranks() > 1 || request.op == ReduceOp::kPremulSum;
    return does_something && pattern(request.kind) == Pattern::kReduceToAll &&
           request.refusal.empty();
  };
  const auto n_reductions = std::count_if(requests.begin(), requests.end(), is_reduction);
  if (n_reductions == 0) {
    return;
  }
  std::vector<Request> reductions;
  std::vector<Request> others;
  if (static_cast<std::size_t>(n_reductions) == requests.size()) {
    reductions.swap(requests);
  } else {
    for (Request& request : requests) {
      (is_reduction(request) ? reductions : others).push_back(std::move(request));
    }
  }
  const FusionDecision decision = decide_fusion(fusion_tensors(reductions), fusion_cost_);
  std::size_t buffer_bytes = 0;
  for (const FusionBatch& fused : decision.batches) {
    buffer_bytes = std::max(buffer_bytes, static_cast<std::size_t>(fused.bytes));
  }
  if (buffer_bytes > 0) {
    // One for all batches, which the stream keeps apart.
    const at::Tensor buffer = scratch_on_current_stream(buffer_bytes, stream.device());
    for (const FusionBatch& fused : decision.batches) {
      FusedPlace place;
      place.n_ranks = lane.n_ranks();
      place.float8 = float8_of(reductions[fused.tensors.front()].type_code);
      place.buffer = data_of(buffer);
      const FusedAllReduce plan = plan_fused_all_reduce(reductions, fused, place);
      NcclPlan call;
      call.calls.push_back(plan.call);
      launch_pack(plan.pack, stream.stream());
      lane.transport().issue(call, stream.stream(), operation, deadline);
      launch_pack(plan.unpack, stream.stream());
    }
  }
  others.reserve(others.size() + decision.direct.size());
  for (const std::size_t index : decision.direct) {
    others.push_back(std::move(reductions[index]));
  }
  requests = std::move(others);
}

}  // namespace horon::torch_backend
