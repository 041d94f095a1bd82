#include "named_cuda.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "cuda/cuda_batches.h"
#include "cuda/cuda_side.h"

namespace horon::torch_backend {
namespace {

class WithCuda final : public NamedCuda {
 public:
  std::unique_ptr<DeviceBatches> make_batches(const c10::intrusive_ptr<c10d::Store>& store, int set,
                                              int rank, int n_ranks) override {
    return std::make_unique<CudaBatches>(state_, store, set, rank, n_ranks);
  }

  void begin(TensorOperation& operation) override {
    const c10::DeviceIndex device = state_->device_of(operation.request->process_set,
                                                      operation.inputs.front().device().index());
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    const bool is_captured =
        c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    TORCH_CHECK_VALUE(!is_captured, "horon: ", describe(*operation.request),
                      ": named operations are agreed between the ranks one by one, and can not be ",
                      "captured into a CUDA graph. Use torch.distributed's functions there.");
    state_->sweep();
    std::vector<c10::Device> devices;
    for (std::size_t i = 0; i < operation.inputs.size(); ++i) {
      devices.push_back(operation.inputs[i].device());
      stage(operation, i, c10::Device(c10::kCUDA, device));
    }
    operation.cuda = std::make_shared<CudaSide>(
        CudaSide{state_, state_->mark(stream), std::move(devices), nullptr, false});
  }

  void run_on(const c10::Stream& stream) override { state_->run_on(c10::cuda::CUDAStream(stream)); }

  void set_default_device(int device) override {
    state_->set_default_device(static_cast<c10::DeviceIndex>(std::max(device, 0)));
  }

 private:
  // Stand-ins on the set's GPU for a tensor of another one. torch's copies between GPUs wait for
  // the current streams of both.
  static void stage(TensorOperation& operation, std::size_t i, c10::Device device) {
    const at::NoGradGuard no_grad;
    at::Tensor& input = operation.inputs[i];
    at::Tensor& written = operation.written[i];
    NamedOperation::Tensor& view = operation.tensors[i];
    if (input.device() != device) {
      input = input.detach().to(device, /*non_blocking=*/true);
      view.input.data =
          static_cast<const std::byte*>(input.numel() > 0 ? input.data_ptr() : nullptr);
    }
    if (written.defined() && written.device() != device) {
      written = at::empty(written.sizes(), written.options().device(device).requires_grad(false),
                          at::MemoryFormat::Contiguous);
      view.output.data =
          static_cast<std::byte*>(written.numel() > 0 ? written.data_ptr() : nullptr);
    }
  }

  const std::shared_ptr<CudaState> state_ = std::make_shared<CudaState>();
};

void move_into(TensorList& kept, TensorOperation::Tensors& tensors) {
  std::move(tensors.begin(), tensors.end(), std::back_inserter(kept));
  tensors.clear();
}

}  // namespace

std::shared_ptr<NamedCuda> NamedCuda::make() { return std::make_shared<WithCuda>(); }

bool has_come(const CudaSide& side) { return !side.done || (*side.done)->is_done(); }

void await_on_stream(TensorOperation& operation) {
  const CudaSide& side = *operation.cuda;
  const c10::DeviceIndex device = side.ready.stream.device_index();
  const c10::cuda::CUDAGuard guard(device);  // the default stream has one handle on all devices
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  if (side.done) {
    (*side.done)->block(stream.stream(), stream.device_index());
  }
  // Memory that was allocated for the results is the set's stream's.
  const NamedKind kind = operation.request->kind;
  const bool was_allocated = kind == NamedKind::kAllGather || kind == NamedKind::kAllToAll;
  for (std::size_t i = 0; i < operation.written.size(); ++i) {
    if (was_allocated || stream != side.ready.stream) {
      operation.written[i].record_stream(stream.unwrap());
    }
    if (was_allocated && operation.outputs[i].device() != side.devices[i]) {
      operation.outputs[i] = operation.written[i] =
          operation.written[i].to(side.devices[i], /*non_blocking=*/true);
    }
  }
}

void let_go(TensorOperation& operation, TensorList& results) noexcept {
  CudaSide& side = *operation.cuda;
  if (side.is_let_go) {
    return;
  }
  side.is_let_go = true;
  try {
    const bool is_taken = !results.empty();
    const bool is_in_order = is_taken && c10::cuda::getCurrentCUDAStream(
                                             side.ready.stream.device_index()) == side.ready.stream;
    TensorList kept;
    move_into(kept, operation.inputs);
    move_into(kept, operation.written);
    move_into(kept, operation.outputs);
    if (!is_in_order) {
      side.state->keep(std::move(kept), side.done);
    }
    if (is_taken) {
      side.state->sweep();
    }
  } catch (const std::exception& error) {
    log_warning(
        concat("letting go of the tensors of ", describe(*operation.request), ": ", error.what()));
  }
}

ReadyMark CudaState::mark(const c10::cuda::CUDAStream& stream) {
  const std::lock_guard lock(mutex_);
  const auto pool = pools_.try_emplace(stream.device_index(), stream.device_index()).first;
  EventPool::Lease event = pool->second.acquire();
  event->record(stream.stream());  // within the lock, so that numbers follow the stream
  return {std::move(event), stream, ++n_marks_};
}

c10::DeviceIndex CudaState::device_of(int set, c10::DeviceIndex first) {
  const std::lock_guard lock(mutex_);
  last_device_ = first;
  return devices_.try_emplace(set, first).first->second;
}

c10::DeviceIndex CudaState::device_of(int set) {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(set);
  if (found != devices_.end()) {
    return found->second;
  }
  const auto chosen = static_cast<c10::DeviceIndex>(last_device_.value_or(default_device_) %
                                                    c10::cuda::device_count());
  return devices_.try_emplace(set, chosen).first->second;
}

void CudaState::set_default_device(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  default_device_ = device;
}

void CudaState::run_on(const c10::cuda::CUDAStream& stream) {
  const std::lock_guard lock(mutex_);
  stream_ = stream;
}

std::optional<c10::cuda::CUDAStream> CudaState::stream() {
  const std::lock_guard lock(mutex_);
  return stream_;
}

void CudaState::keep(TensorList tensors, SharedEvent until) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({std::move(tensors), std::move(until)});
}

void CudaState::sweep() {
  std::deque<Kept> over;  // dies after the lock
  const std::lock_guard lock(mutex_);
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    if (!kept->until || (*kept->until)->is_done()) {
      over.push_back(std::move(*kept));
      kept = kept_.erase(kept);
    } else {
      ++kept;
    }
  }
}

}  // namespace horon::torch_backend
