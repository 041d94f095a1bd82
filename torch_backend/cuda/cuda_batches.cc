#include "cuda/cuda_batches.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "cuda/cuda_error.h"
#include "cuda/pack_kernels.h"
#include "cuda/stream.h"
#include "nccl/named_batch_plan.h"

namespace horon::torch_backend {
namespace {

// Where this many batches are under way, run() looks whether some have come.
constexpr std::size_t kManyPending = 64;

// How long a shutdown waits for the GPU, and then for NCCL.
constexpr std::chrono::seconds kGpuPatience{5};
constexpr std::chrono::seconds kNcclPatience{3};

CudaSide* side_of(const BatchTensor& tensor) {
  return tensor.operation ? static_cast<TensorOperation&>(*tensor.operation).cuda.get() : nullptr;
}

// The stream waits for all inputs: for the last mark of each stream that some were made on.
void await_inputs(const DeviceBatch& batch, const c10::cuda::CUDAStream& stream) {
  std::vector<const ReadyMark*> last;  // few
  for (const BatchTensor& tensor : batch.tensors) {
    const CudaSide* side = side_of(tensor);
    if (side == nullptr) {
      continue;
    }
    const auto same = std::find_if(last.begin(), last.end(), [&](const ReadyMark* mark) {
      return mark->stream == side->ready.stream;
    });
    if (same == last.end()) {
      last.push_back(&side->ready);
    } else if ((*same)->number < side->ready.number) {
      *same = &side->ready;
    }
  }
  for (const ReadyMark* mark : last) {
    mark->event->block(stream.stream(), stream.device_index());
  }
}

}  // namespace

CudaBatches::CudaBatches(std::shared_ptr<CudaState> state, c10::intrusive_ptr<c10d::Store> store,
                         int set, int rank, int n_ranks)
    : state_(std::move(state)),
      store_(std::move(store)),
      set_(set),
      rank_(rank),
      n_ranks_(n_ranks) {}

CudaBatches::~CudaBatches() = default;

std::string CudaBatches::refusal() {
  return c10::cuda::device_count() > 0 ? std::string() : "this process sees no GPU";
}

CudaLane& CudaBatches::lane(const WaitContext& context) {
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) {
      throw GroupError(aborted_);
    }
    if (lane_) {
      return *lane_;
    }
  }
  const c10::DeviceIndex device = state_->device_of(set_);
  std::shared_ptr<CudaLane> made = CudaLane::connect(
      store_, concat("named.", set_), rank_, n_ranks_, device, context.deadline, state_->stream(),
      context.check_interrupt != nullptr ? *context.check_interrupt : std::function<void()>());
  const std::lock_guard lock(mutex_);
  if (!aborted_.empty()) {
    throw GroupError(aborted_);  // and the communicator goes
  }
  lane_ = std::move(made);
  return *lane_;
}

void CudaBatches::run(const DeviceBatch& batch, const WaitContext& context) {
  // First: without it, what comes next would start a context on a thread's default, GPU 0.
  const c10::cuda::CUDAGuard device_guard(state_->device_of(set_));
  const RelaxedCaptureScope uncaptured;
  CudaLane& lane = this->lane(context);
  const c10::cuda::CUDAStreamGuard guard(lane.stream());
  const std::string operation = describe(*batch.tensors.front().request);
  if (pending_.size() >= kManyPending) {
    forget_what_came();
  }
  await_inputs(batch, lane.stream());
  // Also where queueing ends half-way: what was queued uses the tensors.
  const auto mark_done = [&] {
    EventPool::Lease event = lane.events().acquire();
    event->record(lane.stream().stream());
    const auto done = std::make_shared<const EventPool::Lease>(std::move(event));
    for (const BatchTensor& tensor : batch.tensors) {
      if (CudaSide* side = side_of(tensor)) {
        side->done = done;
      }
    }
    pending_.push_back({done, context.deadline, operation});
  };
  try {
    queue(batch, lane, operation, context);
  } catch (const std::exception&) {
    mark_done();
    throw;
  }
  mark_done();
}

void CudaBatches::queue(const DeviceBatch& batch, CudaLane& lane, const std::string& operation,
                        const WaitContext& context) {
  const StreamHandle stream = lane.stream().stream();
  NamedBatchPlace place;
  place.rank = rank_;
  place.n_ranks = n_ranks_;
  // Of this stream, so that it is reused when the stream has come past.
  std::vector<at::Tensor> scratch;
  const auto make_scratch = [&](std::size_t bytes) {
    scratch.push_back(
        at::empty({static_cast<std::int64_t>(bytes)},
                  at::device(c10::Device(c10::kCUDA, lane.device())).dtype(at::kByte)));
    return static_cast<std::byte*>(scratch.back().data_ptr());
  };
  const NamedBatchPlan plan = plan_named_batch(batch, place, make_scratch);
  for (const Span& span : plan.zeros) {
    HORON_CUDA_CHECK(cudaMemsetAsync(span.data, 0, span.bytes, stream), operation);
  }
  launch_pack(plan.before, stream);
  lane.transport().issue({{}, plan.calls, {}}, stream, operation, context.deadline);
  launch_pack(plan.after, stream);
}

void CudaBatches::forget_what_came() {
  while (!pending_.empty() && (*pending_.front().done)->is_done()) {
    pending_.pop_front();
  }
}

DeviceFailure CudaBatches::check() {
  if (pending_.empty()) {
    return {};
  }
  const c10::cuda::CUDAGuard device_guard(lane_->device());
  const RelaxedCaptureScope uncaptured;
  forget_what_came();
  if (pending_.empty()) {
    return {};
  }
  const Pending& oldest = pending_.front();
  if (const auto error = lane_->transport().check_async_error()) {
    return {concat(oldest.operation, ": ", *error), true};
  }
  if (oldest.deadline.has_passed()) {
    return {
        concat(oldest.operation, ": it was queued on the GPU, and has not come to its end within ",
               oldest.deadline.timeout().count(),
               " ms: a GPU of another rank has not come to it, or work before it does not end.")};
  }
  return {};
}

void CudaBatches::abort(const std::string& reason) {
  std::shared_ptr<CudaLane> lane;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_.empty()) {
      aborted_ = reason;
    }
    lane = lane_;
  }
  if (lane) {
    lane->transport().abort(reason);
  }
}

bool CudaBatches::shutdown() {
  std::shared_ptr<CudaLane> lane;
  {
    const std::lock_guard lock(mutex_);
    if (!lane_ || !aborted_.empty()) {
      return true;
    }
    aborted_ = "it was shut down";
    lane = lane_;
  }
  try {
    // Inside NCCL a blocking communicator waits without a limit, so nothing may be left.
    const Deadline patience = Deadline::after(kGpuPatience);
    while (check().text.empty() && !pending_.empty() && !patience.has_passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // CUDA has no wait with a limit
    }
    if (!pending_.empty()) {
      lane->transport().abort("it was shut down before the GPU had come to its end");
      return false;
    }
    lane->transport().close(Deadline::after(kNcclPatience));
  } catch (const Error& error) {
    log_warning(concat("closing the communicator of process set ", set_, ": ", error.what()));
  }
  return true;
}

}  // namespace horon::torch_backend
