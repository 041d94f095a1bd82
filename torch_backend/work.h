// The handle of an asynchronous operation.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "compat.h"
#include "core/lane.h"
#include "hooks.h"

namespace horon::torch_backend {

class Group;

// Thread safety: all methods, as c10d::Work asks.
// Ownership: keeps the tensors of the operation; knows the group only weakly, because its threads
// own works.
class HoronWork : public c10d::Work {
 public:
  // Who can be helped to bring the operation to its end.
  enum class Mover : std::uint8_t { kLane, kMessages };

  struct Origin {
    int rank = 0;
    c10d::OpType op_type = c10d::OpType::UNKNOWN;
    const char* profiling_title = nullptr;
    std::uint64_t sequence = 0;
    std::chrono::milliseconds timeout{0};
    Mover mover = Mover::kLane;
    std::weak_ptr<Group> group;
    std::shared_ptr<Hooks> hooks;
  };

  HoronWork(Origin origin, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs);

  // Waits until the operation has finished and throws its error. A finite `timeout` that expires
  // throws DistBackendError and leaves the operation running. Ctrl-C ends the wait on the main
  // thread.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Makes progress, so that polling comes to an end.
  bool isCompleted() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return origin_.sequence; }
  void synchronize() override {}
  void abort() override;
#if HORON_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif
#if HORON_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return origin_.timeout; }
#endif

  // Ends the operation for hooks and for whoever waits or polls. Called once, with no lock held.
  void complete(std::exception_ptr error);
  // Ends its future, if there is one: callbacks. Called once after complete(), with no lock held.
  void call_back();

  void set_source_rank(int rank) { source_rank_.store(rank, std::memory_order_relaxed); }
  std::uint64_t completion_key() const { return completion_key_; }
  Mover mover() const { return origin_.mover; }

 protected:
  bool is_finished() const;

 private:
  // Has the group's threads run it; false if the system gives none.
  bool leave_to_threads(Group& group) const;
  // Runs it, and what comes before it, on this thread, unless others are at it already.
  // Until it has finished, or for about as long as that.
  void help_here(Group& group, std::chrono::steady_clock::time_point give_up) const;
  void mark_future(const c10::intrusive_ptr<c10::ivalue::Future>& future) const;

  const Origin origin_;
  const std::uint64_t completion_key_;
  const std::vector<at::Tensor> outputs_;
  std::atomic<int> source_rank_{-1};
  // Guarded by c10d::Work's mutex_:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool is_future_marked_ = false;
};

}  // namespace horon::torch_backend
