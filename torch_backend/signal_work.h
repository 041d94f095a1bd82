// The handle of an asynchronous wait for a window's signal.
#pragma once

#include "compat.h"

#if HORON_HAS_WINDOW

#include <memory>
#include <mutex>

#include "core/deadline.h"
#include "shm/window.h"

namespace horon::torch_backend {

// No thread is involved: it completes when somebody waits for it or polls it. The signal is its
// own from the moment it is made, also if nobody ever does.
// Thread safety: all methods, as c10d::Work asks.
class SignalWork final : public c10d::Work {
 public:
  // Takes its place in the queue for `source`'s signals.
  SignalWork(int rank, std::shared_ptr<horon::Window> window, int source, const Deadline& deadline);

  // A finite `timeout` that expires throws DistBackendError, and the signal stays expected.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;
  std::vector<at::Tensor> result() override { return {}; }
  int sourceRank() const override { return source_; }
  // Of a finished one; nobody would complete it otherwise.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void synchronize() override {}
  void abort() override {}

 private:
  bool is_finished() const;
  // The first outcome counts.
  void end(std::exception_ptr error);

  const std::shared_ptr<horon::Window> window_;
  const int source_;
  const Deadline deadline_;
  const std::shared_ptr<ExpectedSignal> signal_;
  std::mutex ending_;  // held while the outcome is decided
};

}  // namespace horon::torch_backend

#endif  // HORON_HAS_WINDOW
