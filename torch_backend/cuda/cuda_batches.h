// Batches of named operations on the GPU that a process set has in this process.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "cuda/cuda_lane.h"
#include "cuda/cuda_side.h"
#include "named/device_batches.h"

namespace horon::torch_backend {

// Thread safety: as DeviceBatches.
class CudaBatches final : public DeviceBatches {
 public:
  CudaBatches(std::shared_ptr<CudaState> state, c10::intrusive_ptr<c10d::Store> store, int set,
              int rank, int n_ranks);
  ~CudaBatches() override;

  std::string refusal() override;
  // The first call makes the communicator, which waits for all ranks.
  void run(const DeviceBatch& batch, const WaitContext& context) override;
  DeviceFailure check() override;
  std::size_t n_under_way() const override { return pending_.size(); }
  bool shutdown() override;
  void abort(const std::string& reason) override;

 private:
  struct Pending {
    SharedEvent done;
    Deadline deadline;
    std::string operation;
  };

  CudaLane& lane(const WaitContext& context);
  void forget_what_came();
  void queue(const DeviceBatch& batch, CudaLane& lane, const std::string& operation,
             const WaitContext& context);

  const std::shared_ptr<CudaState> state_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int set_;
  const int rank_;
  const int n_ranks_;

  std::deque<Pending> pending_;  // in the order of the stream; the attendant's

  std::mutex mutex_;
  // Guarded by mutex_:
  std::shared_ptr<CudaLane> lane_;  // shared with an abort that is under way
  std::string aborted_;             // not empty: why
};

}  // namespace horon::torch_backend
