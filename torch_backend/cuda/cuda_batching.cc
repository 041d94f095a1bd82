#include "cuda/cuda_batching.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "cuda/host_wait.h"
#include "errors.h"
#include "finished_work.h"
#include "group.h"
#include "nccl/named_batch_plan.h"
#include "process_exit.h"

namespace horon::torch_backend {
namespace {

// Names come again, so that the engine knows the calls by small numbers from the second time on.
constexpr std::uint64_t kNamesOfOneKind = 256;

// Nothing where named operations have no such reduction.
std::optional<Reduced> reduced(const Request& request) {
  Reduced how;
  switch (request.op) {
    case ReduceOp::kSum:
      how.op = static_cast<int>(NamedOp::kSum);
      return how;
    case ReduceOp::kAvg:
      how.op = static_cast<int>(NamedOp::kAverage);
      return how;
    case ReduceOp::kMin:
      how.op = static_cast<int>(NamedOp::kMin);
      return how;
    case ReduceOp::kMax:
      how.op = static_cast<int>(NamedOp::kMax);
      return how;
    case ReduceOp::kProduct:
      how.op = static_cast<int>(NamedOp::kProduct);
      return how;
    case ReduceOp::kPremulSum:
      how.op = static_cast<int>(NamedOp::kSum);
      how.prescale = request.factor;
      return how;
    default:
      return std::nullopt;
  }
}

// The memory that is reduced, as one dimension: ranks may have given it different shapes.
at::Tensor flat(const Collective& collective) {
  const at::Tensor& memory = collective.copy_back.empty() ? collective.outputs.front()
                                                          : collective.copy_back.front().second;
  return memory.detach().view({-1});
}

class BatchedWork final : public c10d::Work {
 public:
  BatchedWork(int rank, const DeviceCall& call, std::shared_ptr<BatchedCall> batched,
              std::vector<at::Tensor> outputs, std::weak_ptr<Group> group)
      : c10d::Work(rank, call.op_type),
        call_(call),
        batched_(std::move(batched)),
        outputs_(std::move(outputs)),
        group_(std::move(group)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    synchronize();
    if (timeout > kNoTimeout) {
      await_on_host([this] { return batched_->has_ended(); }, timeout,
                    std::string(call_.name()) + " #" + std::to_string(call_.sequence));
    }
    return true;
  }
  void synchronize() override {
    try {
      batched_->await_on_stream();
    } catch (...) {
      rethrow_translated();
    }
  }
  bool isCompleted() override { return batched_->has_ended(); }
  bool isSuccess() const override { return !batched_->has_failed(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  // Blocks until it is queued: who asks for a future does not come by here again.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    synchronize();
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{outputs_.front().device()});
    future->markCompleted(at::IValue(outputs_));
    return future;
  }
  uint64_t getSequencenumber() const override { return call_.sequence; }
  void abort() override {
    if (const auto group = group_.lock()) {
      group->abort("Work.abort() was called");
    }
  }
#if HORON_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return batched_->completion_key; }
#endif
#if HORON_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return call_.timeout; }
#endif

 private:
  const DeviceCall call_;
  const std::shared_ptr<BatchedCall> batched_;
  const std::vector<at::Tensor> outputs_;
  const std::weak_ptr<Group> group_;
};

}  // namespace

// --- one call ---

void BatchedCall::submit() {
  const std::lock_guard lock(mutex_);
  collective_.prepare();
  handle_ = host_->submit(operation_, false);
}

// Requires the mutex.
void BatchedCall::take() {
  if (is_taken_) {
    return;
  }
  try {
    (void)host_->take(handle_);
    done_ = operation_->cuda->done;
  } catch (...) {  // kept for everybody who asks
    error_ = std::current_exception();
  }
  is_taken_ = true;
}

void BatchedCall::await_queued() {
  const std::lock_guard lock(mutex_);
  take();
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void BatchedCall::await_on_stream() {
  const std::lock_guard lock(mutex_);
  take();
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (!is_delivered_) {
    is_delivered_ = true;
    (void)operation_->take_results();
    collective_.finish();
  } else if (done_) {
    const auto device = static_cast<c10::DeviceIndex>((*done_)->device());
    const c10::cuda::CUDAGuard guard(device);
    (*done_)->block(c10::cuda::getCurrentCUDAStream(device).stream(), device);
  }
}

bool BatchedCall::has_ended() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    return false;
  }
  if (!is_taken_ && host_->poll(handle_)) {
    take();  // does not block now
  }
  return is_taken_ && (error_ || !done_ || (*done_)->is_done());
}

bool BatchedCall::is_queued() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && is_taken_;
}

bool BatchedCall::has_failed() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && error_;
}

// --- all calls of a group ---

bool CudaBatching::takes(const Collective& collective) const {
  if (collective.requests.size() != 1 || (device_ && device_ != collective.device)) {
    return false;
  }
  const Request& request = collective.requests.front();
  const auto how = reduced(request);
  return request.kind == OpKind::kAllReduce && request.refusal.empty() &&
         request.inputs[0].bytes <= parts_.batch_bytes && how &&
         is_reduced_on_device(request.dtype, static_cast<NamedOp>(how->op), how->prescale, 1.0);
}

std::string CudaBatching::name_for(const Collective& collective) {
  const Request& request = collective.requests.front();
  const std::string kind = concat(static_cast<int>(request.type_code), '.', request.count, '.',
                                  static_cast<int>(request.op), '.', request.factor);
  return concat(kind, " #", counters_[kind]++ % kNamesOfOneKind);
}

DeviceSide::WorkPtr CudaBatching::submit(Collective collective, const DeviceCall& call,
                                         const c10::cuda::CUDAStream& stream) {
  std::shared_ptr<NamedEngineHost> host;
  {
    const std::lock_guard lock(mutex_);
    host = host_;
  }
  if (!host) {
    host = std::make_shared<NamedEngineHost>(parts_.store, parts_.rank, parts_.n_ranks,
                                             parts_.timeout, parts_.make_gloo,
                                             /*watched_ranks=*/std::vector<int>());
    host->run_on(stream.unwrap());
    const std::lock_guard lock(mutex_);
    host_ = host;
  }
  device_ = collective.device;
  sweep();
  const std::string name = name_for(collective);
  if (const auto former = named_[name].lock()) {
    former->await_queued();  // a name is in flight once
  }
  const at::Tensor memory = flat(collective);
  const OperationPtr operation =
      host->make_allreduce(0, memory, memory, name, reduced(collective.requests.front()).value());
  const std::vector<at::Tensor> outputs = collective.outputs;
  const auto batched =
      std::make_shared<BatchedCall>(host, operation, std::move(collective), next_completion_key());
  batched->submit();
  named_[name] = batched;
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back(batched);
    if (!is_watched_) {
      CudaWatcher::instance().watch(shared_from_this(), stream.device_index());
      is_watched_ = true;
    }
  }
  auto work = c10::make_intrusive<BatchedWork>(parts_.rank, call, batched, outputs, parts_.group);
  if (!call.is_async) {
    work->synchronize();
  }
  return work;
}

std::vector<CudaBatching::CallPtr> CudaBatching::calls() const {
  const std::lock_guard lock(mutex_);
  return {calls_.begin(), calls_.end()};
}

bool CudaBatching::is_queued() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(calls_.begin(), calls_.end(),
                     [](const CallPtr& call) { return call->is_queued(); });
}

void CudaBatching::flush(const c10::cuda::CUDAStream& stream) {
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const CallPtr& call : calls()) {
    call->await_on_stream();
  }
  sweep();
}

void CudaBatching::sweep() {
  std::vector<CallPtr> ended;
  {
    const std::lock_guard lock(mutex_);
    while (!calls_.empty() && calls_.front()->is_told && calls_.front()->has_ended()) {
      ended.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
  }
  for (const CallPtr& call : ended) {
    if (!call->has_failed()) {
      call->await_on_stream();  // writes results where nobody has waited
    }
  }
}

bool CudaBatching::look() noexcept {
  std::vector<std::uint64_t> completed;
  try {
    // Under the lock, so that the last share of a call, and of its tensors, is never this thread's.
    const std::lock_guard lock(mutex_);
    for (const CallPtr& call : calls_) {
      if (!call->is_told && call->has_ended()) {
        call->is_told = true;
        if (!call->has_failed()) {
          completed.push_back(call->completion_key);
        }
      }
    }
  } catch (const std::exception& error) {
    log_warning(concat("looking at batched operations: ", error.what()));
  }
  for (const std::uint64_t key : completed) {
    const CallOut call_out;
    parts_.hooks->on_completion.call_all(key);
  }
  const std::lock_guard lock(mutex_);
  is_watched_ =
      std::any_of(calls_.begin(), calls_.end(), [](const CallPtr& call) { return !call->is_told; });
  return is_watched_;
}

void CudaBatching::shutdown() {
  std::shared_ptr<NamedEngineHost> host;
  {
    const std::lock_guard lock(mutex_);
    host = host_;
  }
  if (host) {
    host->engine().shutdown();
  }
  const std::lock_guard lock(mutex_);
  calls_.clear();
}

void CudaBatching::abort(const std::string& reason) {
  std::shared_ptr<NamedEngineHost> host;
  {
    const std::lock_guard lock(mutex_);
    host = host_;
  }
  if (host && host->engine().is_running()) {
    host->engine().abort(reason);
  }
}

}  // namespace horon::torch_backend
