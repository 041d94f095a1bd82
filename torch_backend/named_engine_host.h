// A NamedEngine with what it needs from torch: the store, the process sets' groups, the arena.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compat.h"
#include "core/fork_guard.h"
#include "device_side.h"
#include "named/named_engine.h"
#include "named_cuda.h"
#include "named_operation_builder.h"
#include "recent_requests.h"

namespace horon::torch_backend {

// Thread safety: all methods. None may be called with the GIL held unless it says so.
class NamedEngineHost {
 public:
  // Blocks until all ranks have met.
  NamedEngineHost(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout, GlooMaker make_gloo,
                  const std::vector<int>& watched_ranks);
  // Does nothing in a forked child, whose threads are somebody else's.
  ~NamedEngineHost();

  // Throws UsageError when there is no such set.
  SetView view(int process_set) const;

  // Of one tensor. Never blocks; the GIL may be held.
  OperationPtr make_allreduce(int process_set, const at::Tensor& tensor, const at::Tensor& output,
                              std::string_view name, const Reduced& how);
  std::uint64_t submit(const OperationPtr& operation, bool will_wait);
  // The same where that takes no time: on CPU tensors, and with no other thread at the engine just
  // now. Else nullopt, and nothing happened. The GIL may be held.
  std::optional<std::uint64_t> try_submit(const OperationPtr& operation, bool will_wait);
  bool poll(std::uint64_t handle);  // the GIL may be held
  // Blocks until it is done, and forgets the handle; null for one that is unknown. Throws the
  // operation's error.
  OperationPtr take(std::uint64_t handle);
  // Waits a little for the other ranks, where that is worth it; see NamedEngine::meet.
  void meet(std::uint64_t handle);
  // As take(), for one that is done. Null, and nothing happened, if it is not, or is unknown, or if
  // another thread is at the engine just now. Never blocks; the GIL may be held.
  OperationPtr try_take(std::uint64_t handle);
  // Its results. Throws UsageError for an unknown handle.
  TensorList wait(std::uint64_t handle);
  // `device`: see NamedCuda::set_default_device.
  std::uint64_t join(int device);
  std::uint64_t barrier(int process_set);
  int add_process_set(std::vector<int> ranks);
  bool remove_process_set(int id);
  // On rank 0, as in Horovod: all ranks may be given one path. Throws UsageError when the file can
  // not be written.
  void start_timeline(const std::string& path, bool mark_cycles);
  // Throws in a forked child.
  NamedEngine& engine() const;
  // Where batches of CUDA tensors run, if not on a stream of their own. Before the first one.
  void run_on(const c10::Stream& stream) { cuda_->run_on(stream); }
  int rank() const { return rank_; }
  // Whether a second thread of every rank has a core, so that communication can hide behind
  // computation.
  bool has_spare_cores() const { return has_spare_cores_; }

 private:
  int change_sets(const OperationPtr& operation);

  const std::uint32_t fork_generation_ = fork_generation();
  const int rank_;
  const int size_;
  bool has_spare_cores_ = false;
  const std::shared_ptr<NamedCuda> cuda_;
  std::unique_ptr<NamedEngine> engine_;
  RecentRequests recent_;
};

}  // namespace horon::torch_backend
