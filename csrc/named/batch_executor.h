// Carries out agreed batches on the transport of one process set.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/wait_context.h"
#include "named/batch_tensor.h"
#include "named/process_set_lane.h"

namespace horon {

// Thread safety: one thread at a time.
class BatchExecutor {
 public:
  // `rank` is this process's place among `n_ranks` in the set.
  BatchExecutor(std::shared_ptr<ProcessSetLane> lane, int rank, int n_ranks,
                BufferFactory make_buffer);

  ProcessSetLane& lane() { return *lane_; }

  // Requires a batch of plan_fusion. `root` is the root's place in the set. A batch on a device is
  // queued when it returns; see Note [Batches on a device].
  // Throws as Transport::run and DeviceBatches::run.
  void run(const std::vector<BatchTensor>& batch, int root, const WaitContext& context);
  // The same for one tensor of this rank's, if may_leave() holds for it: leaves what others have
  // to do yet, and takes `lead_bytes` more of the work than they do. If something was left, see
  // Transport::run_and_leave, which the transport of the lane has to be asked about then.
  Transport::Leaving run_and_leave(const BatchTensor& tensor, std::uint32_t lead_bytes,
                                   const WaitContext& context);
  // The same as run() for one tensor, reduced a part at a time; what of it is not there yet is made
  // meanwhile, if its maker belongs to this thread. All ranks do.
  void run_in_parts(const BatchTensor& tensor, const WaitContext& context);
  // Whether all that there is to do is one reduction in place, on the transport.
  bool may_leave(const std::vector<BatchTensor>& batch) const;

  // Every rank's numbers, one rank after another. All ranks call it, with equally many numbers.
  std::vector<std::int64_t> gather_numbers(const std::vector<std::int64_t>& numbers,
                                           const WaitContext& context);

 private:
  void all_reduce(const std::vector<BatchTensor>& batch, const WaitContext& context);
  // Notes in pieces_ where the tensors of a batch lie; false if they have to be packed all the
  // same.
  bool gather_pieces(const std::vector<BatchTensor>& batch, std::uint64_t bytes);
  void all_reduce_alone(const BatchTensor& tensor, const WaitContext& context);
  void adasum(const BatchTensor& tensor, const WaitContext& context);
  void all_gather(const std::vector<BatchTensor>& batch, const WaitContext& context);
  void broadcast(const BatchTensor& tensor, int root, const WaitContext& context);
  void all_to_all(const BatchTensor& tensor, const WaitContext& context);
  void reduce_scatter(const BatchTensor& tensor, const WaitContext& context);
  void run_on_device(const std::vector<BatchTensor>& batch, int root, const WaitContext& context);
  void require_device(const WaitContext& context);
  // For reductions.
  Request reduction(OpKind kind, const BatchTensor& like, std::uint64_t count) const;
  // Of results.
  double factor_after(const BatchTensor& tensor) const;
  // Reused from batch to batch.
  std::byte* buffer(std::size_t bytes);

  const std::shared_ptr<ProcessSetLane> lane_;  // shared with who may have to abort it
  const int rank_;
  const int n_ranks_;
  const BufferFactory make_buffer_;
  std::shared_ptr<std::byte> buffer_;
  std::size_t buffer_bytes_ = 0;
  TensorPieces pieces_;
  bool has_asked_for_devices_ = false;
  std::string no_device_;  // why the set has none; empty if it has
};

}  // namespace horon
