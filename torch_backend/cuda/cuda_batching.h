// Separate all-reduces of a group that travel together, where the group's options ask for it.
//
// Note [Boundaries of batches]
// The ranks make the same calls in the same order, but not at the same time, and wait for them at
// different places: a rank that waits for its third call must not be given a batch that another one
// ended after its fifth. So what travels together is agreed, by an engine of named operations of
// the group's own: a call goes out when all ranks have made it. Who waits, on the host, waits for
// that; the GPU's work is waited for by streams. The batches run on the stream that the group's
// other asynchronous operations run on, and those are queued when all calls before them have been:
// so everything keeps its order.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/cuda_side.h"
#include "cuda/cuda_watcher.h"
#include "device_side.h"
#include "named_engine_host.h"

namespace horon::torch_backend {

// One call, from its submission on. Shared between its Work, the group and the watcher's thread.
class BatchedCall {
 public:
  BatchedCall(std::shared_ptr<NamedEngineHost> host, OperationPtr operation, Collective collective,
              std::uint64_t completion_key)
      : completion_key(completion_key),
        host_(std::move(host)),
        operation_(std::move(operation)),
        collective_(std::move(collective)) {}

  void submit();
  // Blocks until it is queued on the GPU. Throws its error, each time.
  void await_queued();
  // Then makes the current stream wait for the results.
  void await_on_stream();
  // Whether the results are there, or an error. Does not block; false also when another thread is
  // about to find out.
  bool has_ended();
  bool has_failed();
  // Whether somebody has seen that it is queued, or has failed.
  bool is_queued();

  const std::uint64_t completion_key;
  bool is_told = false;  // the hooks have been, or are being called; guarded by the group's mutex

 private:
  void take();

  const std::shared_ptr<NamedEngineHost> host_;
  const OperationPtr operation_;
  std::mutex mutex_;
  // Guarded by mutex_:
  Collective collective_;
  std::uint64_t handle_ = 0;
  bool is_taken_ = false;
  bool is_delivered_ = false;  // results are in the user's tensors, in the order of some stream
  SharedEvent done_;
  std::exception_ptr error_;
};

// Thread safety: submit(), flush() and shutdown() one at a time; look() and abort() from any
// thread.
class CudaBatching final : public Watched, public std::enable_shared_from_this<CudaBatching> {
 public:
  explicit CudaBatching(DeviceSideParts parts) : parts_(std::move(parts)) {}

  // Whether a call is one of those that are batched; the same on all ranks.
  bool takes(const Collective& collective) const;
  // The first call makes the engine: blocks until all ranks have come. `stream`: where batches run.
  DeviceSide::WorkPtr submit(Collective collective, const DeviceCall& call,
                             const c10::cuda::CUDAStream& stream);
  // Blocks until all that was submitted is queued. Then `stream` waits for it.
  void flush(const c10::cuda::CUDAStream& stream);
  // Whether all that was submitted is known to be queued. Asks CUDA nothing.
  bool is_queued() const;

  void shutdown();
  void abort(const std::string& reason);

  bool look() noexcept override;

 private:
  using CallPtr = std::shared_ptr<BatchedCall>;

  std::string name_for(const Collective& collective);
  // Lets go of calls that have ended; see Note [Lives of tensors].
  void sweep();
  std::vector<CallPtr> calls() const;

  const DeviceSideParts parts_;
  std::optional<c10::Device> device_;                        // of the first call; submit()'s
  std::map<std::string, std::uint64_t> counters_;            // by what is reduced; submit()'s
  std::map<std::string, std::weak_ptr<BatchedCall>> named_;  // submit()'s

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::shared_ptr<NamedEngineHost> host_;
  std::deque<CallPtr> calls_;  // not ended when somebody looked last
  bool is_watched_ = false;
};

}  // namespace horon::torch_backend
