// The part of a process group that carries tensors of GPUs, by NCCL.
//
// Note [Streams]
// As with PyTorch's own NCCL backend: a synchronous operation is queued on the caller's current
// stream, an asynchronous one on a stream of the group's, which first waits for what the caller's
// stream holds then; Work::wait() makes the stream that is current there wait. The host waits for
// nothing but a communicator's first use, which all ranks have to come to.
//
// Note [Launches that wait]
// NCCL connects ranks when they first need it: for each algorithm, and for messages with each peer.
// Then the call itself waits for the others, without a limit. So the watcher knows of every call
// into NCCL: when one takes too long, or who it waits for has died, the communicator is aborted,
// and the call comes back with an error.
//
// Note [Lives of tensors]
// The memory of a tensor that its owner drops is used again in the order of the stream that it was
// allocated on, which knows nothing of ours. So asynchronous operations keep their tensors: until
// the caller's stream was told to wait, or the watcher has seen the end, whatever is first. In the
// second case the next call lets go of them, not the watcher's thread: the interpreter may be
// ending, and a capture under way forbids freeing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective.h"
#include "cuda/cuda_batching.h"
#include "cuda/cuda_lane.h"
#include "cuda/cuda_operation.h"
#include "cuda/cuda_watcher.h"
#include "cuda/fusion_policy.h"
#include "device_side.h"
#include "hooks.h"

namespace horon::torch_backend {

// Thread safety: all methods.
// Ownership: a Group owns it, and outlives its use.
class CudaGroup final : public DeviceSide,
                        public Watched,
                        public std::enable_shared_from_this<CudaGroup> {
 public:
  explicit CudaGroup(DeviceSideParts parts);

  WorkPtr issue(Collective collective, const DeviceCall& call) override;
  WorkPtr send(const at::Tensor& tensor, int peer, const DeviceCall& call) override;
  WorkPtr recv(const at::Tensor& tensor, int peer, const DeviceCall& call) override;
  void start_coalescing() override;
  WorkPtr end_coalescing(const DeviceCall& call) override;
  void connect(c10::Device device, std::chrono::milliseconds timeout) override;
  void drain(const Deadline& deadline) override;
  void shutdown(const Deadline& drain_until) override;
  void abort(const std::string& reason) override;

  bool look() noexcept override;

 private:
  using OperationPtr = std::shared_ptr<CudaOperation>;

  // Of what is under way, for whoever has to say that it takes too long.
  struct Awaited {
    const char* name = "";
    std::uint64_t sequence = 0;
    Deadline deadline = Deadline::after(std::chrono::milliseconds(0));

    std::string text() const { return std::string(name) + " #" + std::to_string(sequence); }
  };

  // While it lives, the watcher looks after a call into NCCL: see Note [Launches that wait].
  class WatchedLaunch {
   public:
    WatchedLaunch(CudaGroup& group, const Awaited& awaited, c10::DeviceIndex device);
    ~WatchedLaunch();
    WatchedLaunch(const WatchedLaunch&) = delete;
    WatchedLaunch& operator=(const WatchedLaunch&) = delete;

   private:
    CudaGroup& group_;
  };

  // What is queued at once.
  struct Batch {
    std::vector<Request> requests;
    std::vector<NcclCall> messages;
    std::vector<Collective> collectives;  // whose stand-ins are filled and emptied
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    std::optional<c10::Device> device;
  };

  // Calls between start_coalescing() and end_coalescing() add to it.
  struct Coalesced {
    Batch batch;
    bool is_async = false;
  };

  WorkPtr message(const at::Tensor& tensor, int peer, bool is_send, const DeviceCall& call);
  static void add(Batch& batch, Collective collective);
  // Queues the batch on the caller's stream or the lane's.
  WorkPtr queue(CudaLane& lane, Batch batch, const DeviceCall& call);
  void launch(CudaLane& lane, Batch& batch, const c10::cuda::CUDAStream& stream,
              const std::string& operation, const Deadline& deadline);
  // The all-reduces that gain by it go through the fusion buffer; the others stay in `requests`.
  void launch_fused(CudaLane& lane, std::vector<Request>& requests,
                    const c10::cuda::CUDAStream& stream, const std::string& operation,
                    const Deadline& deadline);
  // The lane of all ranks on this device; made when it is first asked for.
  CudaLane& lane_of(c10::Device device, const Deadline& deadline);
  // The lane of this rank and another one: their messages wait for nobody else's.
  CudaLane& lane_with(int peer, c10::Device device, const Deadline& deadline);
  // `peer`: the only other rank, where there is one.
  CudaLane& find_or_connect(const std::string& name, int rank, int n_ranks, std::optional<int> peer,
                            c10::Device device, const Deadline& deadline);
  // Throws PeerLostError where a rank that is waited for will never come.
  void check_peers(const std::string& communicator, std::optional<int> only) const;
  // What was batched goes before whatever is queued on `stream` now.
  void flush_batches(const c10::cuda::CUDAStream& stream, bool is_captured);
  void watch(const OperationPtr& operation);
  void watch_locked(c10::DeviceIndex device);
  void release_ended();
  std::vector<std::shared_ptr<CudaLane>> lanes() const;
  void check_open(const char* operation) const;
  [[noreturn]] void rethrow_failed();

  // The watcher's.
  std::vector<OperationPtr> pending();
  // What has ended is finished; returns what has not, the launch last.
  std::vector<Awaited> finish_ended(const std::vector<OperationPtr>& pending);
  void look_at(const std::vector<Awaited>& left);
  std::string describe_timeout(const Awaited& late);
  // A rank of this host whose process has ended, or whether that one has; empty if there is none.
  std::string find_dead_peer(std::optional<int> only = {}) const;
  // See Note [Whose connection it was].
  std::string with_dead_peer(const std::string& reason) const;
  void stop(const std::string& reason, bool is_peer_lost) noexcept;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int n_ranks_;
  const std::weak_ptr<Group> group_;
  const std::shared_ptr<Hooks> hooks_;
  // Equal on all ranks: it says which calls are made.
  const FusionCost fusion_cost_;

  // Held while operations are queued: a communicator belongs to one thread at a time. Taken before
  // mutex_.
  std::mutex issue_mutex_;
  std::optional<Coalesced> coalesced_;  // guarded by issue_mutex_
  // Null unless the options ask for it; see Note [Boundaries of batches].
  const std::shared_ptr<CudaBatching> batching_;
  std::map<std::string, int> devices_used_;  // guarded by issue_mutex_; numbers lanes

  mutable std::mutex mutex_;
  std::condition_variable idle_;  // nothing of in_flight_ is under way
  // Guarded by mutex_:
  std::map<std::pair<std::string, c10::DeviceIndex>, std::shared_ptr<CudaLane>> lanes_;
  std::deque<OperationPtr> in_flight_;  // in the order of their calls
  std::optional<Awaited> launch_;
  bool is_watched_ = false;
  std::string failure_;  // not empty: why nothing goes on

  std::atomic<std::uint64_t> last_sequence_{0};  // of what was queued; for messages

  // The watcher's:
  int looks_ = 0;
  std::optional<Clock::time_point> peer_died_at_;
  std::string dead_peer_;
};

}  // namespace horon::torch_backend
