// horon's c10d::Backend: checks arguments, makes requests, hands them to the group's lane.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend_options.h"
#include "compat.h"
#include "core/function_ref.h"
#include "finished_work.h"
#include "gloo_maker.h"
#include "group.h"
#include "hooks.h"
#include "request_builder.h"
#include "work.h"

namespace horon::torch_backend {

// What a backend that takes another one's place gets from it.
struct Beginning {
  std::shared_ptr<Hooks> hooks = std::make_shared<Hooks>();
  // For the ranks to meet, if not the group's timeout.
  std::optional<std::chrono::milliseconds> meeting_timeout;
  // Called now and then while they meet; throws to give up.
  std::function<void()> look_around;
};

// Thread safety: all methods, as c10d asks.
class HoronBackend : public c10d::Backend {
 public:
  // Blocks until all ranks of the group are here. Not to be called with the GIL held.
  HoronBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               c10::intrusive_ptr<BackendOptions> options, GlooMaker make_gloo,
               Beginning beginning = {});
  ~HoronBackend() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<BackendOptions> options() const { return options_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
#if HORON_HAS_HOOKS
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) override;
#endif
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Beside c10d: no Work, no hooks, and the group's own timeout. For any tensor.
  virtual void all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op);

  // The shortest way for one plain tensor (RequestBuilder::is_plain_cpu): blocks, allocates
  // nothing.
  WorkPtr all_reduce_now(const at::Tensor& tensor, const Reduction& reduction,
                         std::chrono::milliseconds timeout, bool wants_work = true);

  // A group of the same members with an order of its own, which they make together. It ends with
  // whoever holds it, and with this one: what aborts this one, shuts it down or changes its timeout
  // does so to the twin, and hooks hear of both. Throws if not all come within a minute.
  virtual c10::intrusive_ptr<HoronBackend> make_twin();
  // The same as long as the members are.
  virtual std::weak_ptr<const void> members() const { return group_; }
  // Peers::may_meet() of ranks that share memory; elsewhere false.
  virtual bool may_meet() const;
  // Beside c10d, asynchronous, for a plain tensor: part by part, while `maker` makes it on this
  // thread, or of what is made already if there is none, as ranks please. See Note [Made in parts].
  virtual WorkPtr all_reduce_in_parts(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                      std::shared_ptr<PartMaker> maker);

  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Memory in the arena, for FSDP2's buffers: of CPU groups whose ranks share memory.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Connects the communicator before the first operation: init_process_group(device_id=...).
  void eagerConnectSingleDevice(at::Device device) override;

  void enableCollectivesTiming() override {}  // there are no events to be timed

  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  // A group with ranks of other worlds, who meet in `store`.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& opts, const int& rank,
                                          const int& size) override;

  // A group of the ranks that are left, which meet without the others, dead or not. With the flag
  // SHRINK_ABORT this group fails what is pending first.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<Options>& opts_override) override;
  // Meets for shrink(), which then returns what was made here, if it is called with these ranks.
  virtual void prepare_shrink(const std::vector<int64_t>& ranks_to_exclude,
                              std::chrono::milliseconds timeout);

  // Sequence numbers start at 0 on every rank and count collectives.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

#if HORON_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override { hooks_->on_completion.remove(id); }
  bool supportsAbortHooks() const override { return true; }
#endif
#if HORON_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    hooks_->on_abort->add(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { hooks_->on_abort->remove(id); }
#endif

#if HORON_HAS_WINDOW
  // Of groups whose ranks share memory and have arenas.
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

  // True when all ranks share memory; false where bytes go over a network.
  virtual bool is_shared() const { return shares_memory(); }
  virtual std::string transport() const { return group_->transport_name(); }
  // False once it was shut down or aborted.
  virtual bool is_open() const { return group_->is_open(); }
  // Of this group, as far as this process can see: those on its host.
  virtual std::vector<int> ended_ranks() const { return group_->ended_ranks(); }
  // As abort(), without waiting for the hooks: the flight recorder's takes seconds.
  virtual void give_up(const std::string& reason);
  // Ends the group here as a process that exits does, without waiting for what is pending: other
  // ranks lose what needs this one, and no more.
  void leave();

 protected:
  // One without members, which only a class that overrides everything can be.
  struct WithoutMembers {};
  HoronBackend(WithoutMembers, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               c10::intrusive_ptr<BackendOptions> options, GlooMaker make_gloo);

  bool has_members() const { return group_ != nullptr; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  const GlooMaker& make_gloo() const { return make_gloo_; }
  const std::shared_ptr<Hooks>& hooks() const { return hooks_; }

 private:
  // What issue() needs besides the collective.
  struct Call {
    c10d::OpType op_type;
    const char* title;  // of the profiler's event
    std::chrono::milliseconds timeout;
    bool is_async;
    HoronWork::Mover mover = HoronWork::Mover::kLane;
  };

  bool shares_memory() const { return group_->shared() != nullptr; }
  // Where Gloo's threads may hold Python's context: see Note [Kept contexts].
  void keep_context_from_gloo() const;
  WorkPtr issue(Collective collective, const Call& call);
  // What carries the tensors of GPUs; made when it is first asked for.
  std::shared_ptr<DeviceSide> device_side();
  static DeviceCall to_device(const Call& call, std::uint64_t sequence);
  WorkPtr coalesced_work(std::vector<c10::intrusive_ptr<HoronWork>> parts, Call call);
  WorkPtr message_on_device(const at::Tensor& tensor, int peer, c10d::OpType op_type);
  // Runs the requests in this group's turn, on this thread if nothing is queued. `staged`: whose
  // requests they are, if there may be stand-ins to fill.
  void run_now(c10::ArrayRef<Request> requests, c10::ArrayRef<at::Tensor> inputs, const Call& call,
               Collective* staged = nullptr);
  // What a synchronous call returns: null, unless somebody wants to hear of its completion.
  WorkPtr finished_work(const Call& call, std::uint64_t sequence,
                        c10::ArrayRef<at::Tensor> outputs) const;
  WorkPtr issue_message(at::Tensor& tensor, int peer, int tag, c10d::OpType op_type);
  WorkPtr message_over_gloo(Tensors& tensors, int peer, int tag, c10d::OpType op_type);
  c10::intrusive_ptr<HoronWork> make_work(const Call& call, std::uint64_t sequence,
                                          const Tensors& inputs, Tensors outputs);
  std::chrono::milliseconds resolve(std::chrono::milliseconds timeout) const;
  void check_rank(const char* operation, int peer) const;
  // What a group made out of this one gets: our settings, with what `opts` asks for.
  c10::intrusive_ptr<BackendOptions> options_for_child(
      const c10::intrusive_ptr<Options>& opts) const;
  c10::intrusive_ptr<HoronBackend> make_shrunk(const std::vector<int64_t>& ranks_to_exclude,
                                               const c10::intrusive_ptr<Options>& opts,
                                               std::optional<std::chrono::milliseconds> timeout);
  // What these ranks are in the default group.
  std::vector<uint64_t> global_ranks_of(const std::vector<int>& ranks) const;
  // A prefix that only the members of the split get, and once. Default names come again, so each
  // counts the splits with this name and these ranks that it was in; other ranks need not call.
  std::string next_split_key(const std::string& name, const std::vector<int>& ranks);
  const at::Tensor& single(const Tensors& tensors, OpKind kind) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<BackendOptions> options_;
  const GlooMaker make_gloo_;
  const RequestBuilder builder_;
  const std::shared_ptr<Hooks> hooks_;
  std::shared_ptr<Group> group_;  // null without members
  std::atomic<std::uint64_t> sequence_{0};
  // Calls visit(group) for each twin that there is.
  void visit_twins(FunctionRef<void(Group&)> visit);

  std::mutex twins_mutex_;
  int n_twins_ = 0;                          // ever made; guarded by twins_mutex_
  std::vector<std::weak_ptr<Group>> twins_;  // guarded by twins_mutex_

  std::mutex prepared_mutex_;
  std::vector<int64_t> prepared_without_;      // guarded by prepared_mutex_
  c10::intrusive_ptr<HoronBackend> prepared_;  // guarded by prepared_mutex_

  std::mutex splits_mutex_;
  std::map<std::string, int> splits_;  // how often each was made; guarded by splits_mutex_

  std::mutex coalescing_mutex_;
  std::atomic<bool> is_coalescing_{false};                // changed under coalescing_mutex_
  std::vector<c10::intrusive_ptr<HoronWork>> coalesced_;  // guarded by coalescing_mutex_
  std::vector<WorkPtr> coalesced_over_gloo_;              // guarded by coalescing_mutex_
};

}  // namespace horon::torch_backend
