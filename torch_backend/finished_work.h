// The handle of a synchronous operation, for those who want to hear that it has finished.
#pragma once

#include <vector>

#include <c10/util/SmallVector.h>

#include "compat.h"

namespace horon::torch_backend {

// Never used again in this process: hooks tell operations apart by it.
std::uint64_t next_completion_key();

// Thread safety: immutable.
class FinishedWork final : public c10d::Work {
 public:
  FinishedWork(int rank, c10d::OpType op_type, std::uint64_t sequence,
               c10::ArrayRef<at::Tensor> outputs)
      : c10d::Work(rank, op_type),
        completion_key_(next_completion_key()),
        sequence_(sequence),
        outputs_(outputs.begin(), outputs.end()) {
    completed_ = true;
  }

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/ = kNoTimeout) override { return true; }
  void synchronize() override {}
  void abort() override {}
  std::vector<at::Tensor> result() override { return {outputs_.begin(), outputs_.end()}; }
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(at::IValue(result()));
    return future;
  }
#if HORON_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif
  std::uint64_t completion_key() const { return completion_key_; }

 private:
  const std::uint64_t completion_key_;
  const std::uint64_t sequence_;
  const c10::SmallVector<at::Tensor, 1> outputs_;  // mostly one: no memory of its own
};

}  // namespace horon::torch_backend
