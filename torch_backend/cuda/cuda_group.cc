#include "cuda/cuda_group.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "append.h"
#include "core/error.h"
#include "core/log.h"
#include "cuda/stream.h"
#include "cuda/stream_drain.h"
#include "errors.h"
#include "group.h"
#include "process_exit.h"

namespace horon::torch_backend {
namespace {

using c10::cuda::CUDAStream;

// A healthy communicator is freed at once.
constexpr std::chrono::seconds kCloseTimeout{10};

bool is_capturing_on(c10::DeviceIndex device) {
  return is_capturing(c10::cuda::getCurrentCUDAStream(device).stream());
}

// Shows the call in a profiler's trace.
class ProfiledCall {
 public:
  ProfiledCall(const char* title, const std::vector<at::Tensor>& inputs) {
    if (!at::hasCallbacks()) {
      return;
    }
    profile_.emplace(at::RecordScope::USER_SCOPE);
    if (profile_->isActive()) {
      std::vector<c10::IValue> values(inputs.begin(), inputs.end());
      profile_->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
    }
  }

 private:
  std::optional<at::RecordFunction> profile_;
};

}  // namespace

CudaGroup::CudaGroup(DeviceSideParts parts)
    : store_(parts.store),
      rank_(parts.rank),
      n_ranks_(parts.n_ranks),
      group_(parts.group),
      hooks_(parts.hooks),
      batching_(parts.batch_bytes > 0 ? std::make_shared<CudaBatching>(std::move(parts))
                                      : nullptr) {}

void CudaGroup::check_open(const char* operation) const {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    throw GroupError(concat(operation, ": the group can not go on: ", failure_));
  }
}

// In a catch block. What ends the group ends it for everybody who waits here.
void CudaGroup::rethrow_failed() {
  const std::exception_ptr error = std::current_exception();
  if (!ends_group(error)) {
    rethrow_translated();
  }
  std::string reason;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLostError& lost) {
    reason = with_dead_peer(lost.what());
  } catch (const std::exception& other) {
    reason = other.what();
  }
  stop(reason, false);
  std::rethrow_exception(translated(std::make_exception_ptr(GroupError(reason))));
}

// --- lanes ---

CudaLane& CudaGroup::find_or_connect(const std::string& name, int rank, int n_ranks,
                                     std::optional<int> peer, c10::Device device,
                                     const Deadline& deadline) {
  const auto key = std::make_pair(name, device.index());
  {
    const std::lock_guard lock(mutex_);
    const auto found = lanes_.find(key);
    if (found != lanes_.end()) {
      return *found->second;
    }
  }
  HORON_CHECK(
      !is_capturing_on(device.index()), "communicator '", name, "' of ", device,
      ": a graph is being captured, and the ranks have not connected yet. Run the operation "
      "once before the capture, or pass device_id to init_process_group.");
  // Ranks have different device numbers: their first devices belong together, and so on.
  const int number = devices_used_[name]++;
  const std::string full_name = concat(name, '/', number);
  auto lane = CudaLane::connect(store_, full_name, rank, n_ranks, device.index(), deadline, {},
                                [&] { check_peers(full_name, peer); });
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    throw GroupError(failure_);
  }
  return *(lanes_[key] = std::move(lane));
}

CudaLane& CudaGroup::lane_of(c10::Device device, const Deadline& deadline) {
  return find_or_connect("all", rank_, n_ranks_, std::nullopt, device, deadline);
}

CudaLane& CudaGroup::lane_with(int peer, c10::Device device, const Deadline& deadline) {
  const auto [low, high] = std::minmax(rank_, peer);
  return find_or_connect(concat(low, '-', high), rank_ == low ? 0 : 1, 2, peer, device, deadline);
}

std::vector<std::shared_ptr<CudaLane>> CudaGroup::lanes() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<CudaLane>> all;
  all.reserve(lanes_.size());
  for (const auto& [key, lane] : lanes_) {
    all.push_back(lane);
  }
  return all;
}

void CudaGroup::connect(c10::Device device, std::chrono::milliseconds timeout) {
  try {
    const std::lock_guard issuing(issue_mutex_);
    check_open("connect");
    lane_of(device, Deadline::after(timeout));
  } catch (...) {
    rethrow_failed();
  }
}

// --- calls ---

void CudaGroup::add(Batch& batch, Collective collective) {
  if (!collective.device) {
    return;
  }
  TORCH_CHECK_VALUE(!batch.device || *batch.device == *collective.device,
                    "horon: a coalesced batch has tensors on ", *batch.device, " and on ",
                    *collective.device, "; use one batch for each device.");
  batch.device = collective.device;
  append(batch.requests, collective.requests);
  append(batch.inputs, collective.inputs);
  append(batch.outputs, collective.outputs);
  batch.collectives.push_back(std::move(collective));
}

DeviceSide::WorkPtr CudaGroup::issue(Collective collective, const DeviceCall& call) {
  const ProfiledCall profiled(call.title, collective.inputs);
  try {
    const std::lock_guard issuing(issue_mutex_);
    check_open(call.name());
    if (coalesced_) {
      coalesced_->is_async |= call.is_async;
      add(coalesced_->batch, std::move(collective));
      return nullptr;
    }
    CudaLane& lane = lane_of(collective.device.value(), Deadline::after(call.timeout));
    if (batching_ && batching_->takes(collective) && !is_capturing_on(lane.device())) {
      const c10::cuda::CUDAGuard device_guard(lane.device());
      return batching_->submit(std::move(collective), call, lane.stream());
    }
    Batch batch;
    add(batch, std::move(collective));
    return queue(lane, std::move(batch), call);
  } catch (...) {
    rethrow_failed();
  }
}

DeviceSide::WorkPtr CudaGroup::send(const at::Tensor& tensor, int peer, const DeviceCall& call) {
  return message(tensor, peer, true, call);
}

DeviceSide::WorkPtr CudaGroup::recv(const at::Tensor& tensor, int peer, const DeviceCall& call) {
  return message(tensor, peer, false, call);
}

DeviceSide::WorkPtr CudaGroup::message(const at::Tensor& tensor, int peer, bool is_send,
                                       const DeviceCall& call) {
  const ProfiledCall profiled(call.title, {tensor});
  try {
    const std::lock_guard issuing(issue_mutex_);
    check_open(call.name());
    TORCH_CHECK_VALUE(coalesced_ || peer != rank_, "horon: ", call.name(), ": rank ", rank_,
                      " sends a CUDA tensor to itself or receives it; do both in one "
                      "batch_isend_irecv().");
    Collective collective;
    const Span span = is_send ? Span{} : stage_output(collective, tensor, false);
    const ConstSpan source = is_send ? stage_input(collective, tensor) : ConstSpan{};
    (is_send ? collective.inputs : collective.outputs) = {tensor};
    const int in_group = coalesced_ ? peer : (rank_ < peer ? 1 : 0);
    const NcclCall nccl_call = is_send ? plan_send(source, in_group) : plan_recv(span, in_group);
    Batch alone;
    Batch& batch = coalesced_ ? coalesced_->batch : alone;
    add(batch, std::move(collective));
    if (nccl_call.count > 0) {
      batch.messages.push_back(nccl_call);
    }
    if (coalesced_) {
      coalesced_->is_async = true;
      return nullptr;
    }
    CudaLane& lane = lane_with(peer, tensor.device(), Deadline::after(call.timeout));
    return queue(lane, std::move(alone), call);
  } catch (...) {
    rethrow_failed();
  }
}

void CudaGroup::start_coalescing() {
  const std::lock_guard issuing(issue_mutex_);
  coalesced_ = Coalesced{};
}

DeviceSide::WorkPtr CudaGroup::end_coalescing(const DeviceCall& call) {
  try {
    const std::lock_guard issuing(issue_mutex_);
    std::optional<Coalesced> coalesced;
    coalesced.swap(coalesced_);
    if (!coalesced || !coalesced->batch.device) {
      return nullptr;
    }
    check_open(call.name());
    DeviceCall whole = call;
    whole.is_async = coalesced->is_async;
    Batch& batch = coalesced->batch;
    const ProfiledCall profiled(call.title, batch.inputs);
    CudaLane& lane = lane_of(*batch.device, Deadline::after(call.timeout));
    return queue(lane, std::move(batch), whole);
  } catch (...) {
    rethrow_failed();
  }
}

// --- what is under way ---

void CudaGroup::watch(const OperationPtr& operation) {
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(operation);
  watch_locked(operation->stream().device_index());
}

void CudaGroup::watch_locked(c10::DeviceIndex device) {
  if (!is_watched_) {
    CudaWatcher::instance().watch(shared_from_this(), device);
    is_watched_ = true;
  }
}

CudaGroup::WatchedLaunch::WatchedLaunch(CudaGroup& group, const Awaited& awaited,
                                        c10::DeviceIndex device)
    : group_(group) {
  const std::lock_guard lock(group_.mutex_);
  group_.launch_ = awaited;
  group_.watch_locked(device);
}

CudaGroup::WatchedLaunch::~WatchedLaunch() {
  const std::lock_guard lock(group_.mutex_);
  group_.launch_.reset();
}

// See Note [Lives of tensors].
void CudaGroup::release_ended() {
  std::vector<OperationPtr> ended;
  {
    const std::lock_guard lock(mutex_);
    while (!in_flight_.empty() && in_flight_.front()->is_over()) {
      ended.push_back(std::move(in_flight_.front()));
      in_flight_.pop_front();
    }
  }
  for (const OperationPtr& operation : ended) {
    (void)operation->take_kept();
  }
}

void CudaGroup::flush_batches(const CUDAStream& stream, bool is_captured) {
  if (!batching_ || (is_captured && batching_->is_queued())) {
    return;
  }
  HORON_CHECK(
      !is_captured,
      "a graph is being captured while batched operations are not queued yet; wait for them "
      "before the capture.");
  batching_->flush(stream);
}

void CudaGroup::drain(const Deadline& deadline) {
  if (batching_) {
    for (const std::shared_ptr<CudaLane>& lane : lanes()) {
      flush_batches(c10::cuda::getCurrentCUDAStream(lane->device()), false);
    }
  }
  std::vector<CUDAStream> streams;
  for (const std::shared_ptr<CudaLane>& lane : lanes()) {
    streams.push_back(c10::cuda::getCurrentCUDAStream(lane->device()));
    streams.push_back(lane->stream());
  }
  drain_streams(streams, deadline);
  try {
    check_open("synchronize");
  } catch (...) {
    rethrow_translated();
  }
}

void CudaGroup::shutdown(const Deadline& drain_until) {
  if (batching_) {
    batching_->shutdown();
  }
  const auto is_idle = [this] {
    return std::all_of(in_flight_.begin(), in_flight_.end(),
                       [](const OperationPtr& operation) { return operation->is_over(); });
  };
  bool is_healthy = false;
  {
    // The watcher says so, and ends what takes too long.
    std::unique_lock lock(mutex_);
    const bool is_drained = idle_.wait_until(lock, drain_until.at(), is_idle);
    is_healthy = is_drained && failure_.empty();
    if (failure_.empty()) {
      failure_ = "the process group was destroyed";
    }
  }
  if (!is_healthy) {
    abort("the process group was destroyed while operations were under way");
  } else {
    for (const std::shared_ptr<CudaLane>& lane : lanes()) {
      try {
        CudaLane::end(lane,
                      [](CudaLane& one) { one.transport().close(Deadline::after(kCloseTimeout)); });
      } catch (const Error& error) {
        log_warning(concat("closing a communicator: ", error.what()));
      }
    }
  }
  release_ended();
}

void CudaGroup::abort(const std::string& reason) {
  std::vector<OperationPtr> under_way;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
      failure_ = reason;
    }
    under_way.assign(in_flight_.begin(), in_flight_.end());
  }
  for (const OperationPtr& operation : under_way) {
    operation->fail(
        translated(std::make_exception_ptr(GroupError(concat(operation->text(), ": ", reason)))));
  }
  idle_.notify_all();
  if (batching_) {
    batching_->abort(reason);
  }
  for (const std::shared_ptr<CudaLane>& lane : lanes()) {
    CudaLane::end(lane, [reason](CudaLane& one) { one.transport().abort(reason); });
  }
}

}  // namespace horon::torch_backend
