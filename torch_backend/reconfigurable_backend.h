// A backend whose members change: torch 2.15's `reconfigure`.
#pragma once

#include "backend.h"

#if HORON_HAS_RECONFIGURE

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>

#include "core/fork_guard.h"

namespace horon::torch_backend {

// Note [Changing members]
// A HoronBackend is as constant as its group. With other members it is another one, to which this
// one passes every call on. The first, which is this one itself, costs a look at one flag more than
// it did; each later one is held by whoever is inside a call of it, so an operation that waits in
// another thread fails in the group that it was issued to, and nothing is freed under it.
//
// The new members meet before the old group ends: who can not meet them keeps what it had.
//
// Thread safety: all methods. Ranks and sizes are plain numbers of c10d's, so reading them while
// they change is the caller's affair.
class ReconfigurableBackend final : public HoronBackend {
 public:
  // With members from the beginning: blocks until they are here, as any other.
  ReconfigurableBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                        const c10::intrusive_ptr<BackendOptions>& options, GlooMaker make_gloo);
  // Without: reconfigure() gives it some. Until then it has the rank and size given here.
  struct Empty {};
  ReconfigurableBackend(Empty, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                        const c10::intrusive_ptr<BackendOptions>& options, GlooMaker make_gloo);
  ~ReconfigurableBackend() override;

  bool supportsReconfigure() const override { return true; }
  // What the members' processes exchange, by whatever way they have.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Blocks until all members have called it with the same arguments.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;

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
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) override;
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
  void all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op) override;
  c10::intrusive_ptr<HoronBackend> make_twin() override;
  std::weak_ptr<const void> members() const override;
  bool may_meet() const override;
  WorkPtr all_reduce_in_parts(const at::Tensor& tensor, const c10d::ReduceOp& op,
                              std::shared_ptr<PartMaker> maker) override;

  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void eagerConnectSingleDevice(at::Device device) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& opts, const int& rank,
                                          const int& size) override;
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<Options>& opts_override) override;
  void prepare_shrink(const std::vector<int64_t>& ranks_to_exclude,
                      std::chrono::milliseconds timeout) override;
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;

  bool isInitialized() override;
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool is_shared() const override;
  std::string transport() const override;
  bool is_open() const override;
  std::vector<int> ended_ranks() const override;
  void give_up(const std::string& reason) override;

 private:
  // The backend that has the members; null if there are none yet.
  // `held` keeps it for as long as the caller uses it.
  HoronBackend* find_current(c10::intrusive_ptr<HoronBackend>& held) const;
  // pass(backend) on the one that has the members. Throws if there are none.
  template <typename Pass>
  auto on_current(const char* operation, const Pass& pass) const;
  // The same; does nothing if there are none.
  template <typename Pass>
  void if_members(const Pass& pass) const;
  // The same, or what it is without members.
  template <typename Pass, typename Value>
  Value on_current_or(const Pass& pass, Value without) const;

  const std::uint64_t instance_;  // of the handles
  const std::uint32_t fork_generation_ = fork_generation();

  // Held while the members meet, so that one change ends before the next begins.
  std::timed_mutex reconfiguring_;
  std::set<std::int64_t> used_uuids_;  // guarded by reconfiguring_

  std::atomic<int> n_aborts_{0};
  std::atomic<bool> is_reconfigured_{false};  // once current_ is set
  mutable std::mutex current_mutex_;
  c10::intrusive_ptr<HoronBackend> current_;  // guarded by current_mutex_
};

}  // namespace horon::torch_backend

#endif
