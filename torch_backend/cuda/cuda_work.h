// The handle of an operation on a GPU.
#pragma once

#include <memory>
#include <vector>

#include "compat.h"
#include "cuda/cuda_operation.h"
#include "group.h"

namespace horon::torch_backend {

// Thread safety: all methods, as c10d::Work asks.
class CudaWork final : public c10d::Work {
 public:
  struct Origin {
    int rank = 0;
    c10d::OpType op_type = c10d::OpType::UNKNOWN;
    std::chrono::milliseconds timeout{0};
    int source_rank = -1;      // of a received message
    bool is_captured = false;  // it is part of a graph, and never runs by itself
    std::weak_ptr<Group> group;
  };

  CudaWork(const Origin& origin, std::shared_ptr<CudaOperation> operation,
           std::vector<at::Tensor> outputs);

  // Makes the current stream of the device wait, and returns: the host goes on. With a finite
  // `timeout` it waits on the host, and throws DistBackendError when it expires; the operation goes
  // on. Throws the error of an operation that has failed by now.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override { return operation_->error(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  // Completed from the start, as torch's futures of GPU work are: streams wait, not the host.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override { return origin_.source_rank; }
  uint64_t getSequencenumber() const override { return operation_->sequence(); }
  void abort() override;
#if HORON_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return operation_->completion_key(); }
#endif
#if HORON_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return origin_.timeout; }
#endif

 private:
  void rethrow_error() const;

  const Origin origin_;
  const std::shared_ptr<CudaOperation> operation_;
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by c10d::Work's mutex_
};

}  // namespace horon::torch_backend
