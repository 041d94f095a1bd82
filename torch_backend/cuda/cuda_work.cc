#include "cuda/cuda_work.h"

#include <c10/cuda/CUDAGuard.h>

#include "cuda/host_wait.h"

namespace horon::torch_backend {
CudaWork::CudaWork(const Origin& origin, std::shared_ptr<CudaOperation> operation,
                   std::vector<at::Tensor> outputs)
    : c10d::Work(origin.rank, origin.op_type),
      origin_(origin),
      operation_(std::move(operation)),
      outputs_(std::move(outputs)) {}

void CudaWork::rethrow_error() const {
  if (const std::exception_ptr error = operation_->error()) {
    std::rethrow_exception(error);
  }
}

bool CudaWork::wait(std::chrono::milliseconds timeout) {
  const auto group = origin_.group.lock();
  if (group != nullptr) {
    group->check_process("wait");
  }
  synchronize();
  if (timeout > kNoTimeout && !origin_.is_captured) {
    await_on_host([this] { return operation_->has_ended(); }, timeout, operation_->text());
  }
  rethrow_error();
  return true;
}

void CudaWork::synchronize() {
  operation_->block(c10::cuda::getCurrentCUDAStream(operation_->stream().device_index()));
}

bool CudaWork::isCompleted() { return origin_.is_captured || operation_->has_ended(); }

bool CudaWork::isSuccess() const { return operation_->error() == nullptr; }

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (future_) {
      return future_;
    }
    const std::vector<c10::Device> devices = {operation_->stream().device()};
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
    future = future_;
  }
  // It records events on the current stream: those of the operation's.
  const c10::cuda::CUDAStreamGuard guard(operation_->stream());
  future->markCompleted(at::IValue(outputs_));
  return future;
}

void CudaWork::abort() {
  if (const auto group = origin_.group.lock()) {
    group->abort("Work.abort() was called");
  }
}

}  // namespace horon::torch_backend
