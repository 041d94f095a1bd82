#include "reconfigurable_backend.h"

#if HORON_HAS_RECONFIGURE

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>
#include <variant>

#include "core/error.h"
#include "core/random_nonce.h"
#include "errors.h"
#include "members/membership.h"
#include "store_adapter.h"
#include "without_gil.h"

namespace horon::torch_backend {
namespace {

Membership plan(const c10d::ReconfigureOptions& opts, std::uint64_t own) {
  const bool is_order_given = std::holds_alternative<std::vector<std::string>>(opts.handles);
  const auto handles = std::visit(
      [](const auto& given) { return std::vector<std::string>(given.begin(), given.end()); },
      opts.handles);
  try {
    return plan_membership(handles, is_order_given, own);
  } catch (const UsageError& error) {
    // As other backends, not as ValueError.
    TORCH_CHECK(false, "horon: reconfigure: ", error.what(), ".");
  }
}

// Where the members of this change meet.
c10::intrusive_ptr<c10d::Store> meeting_of(const c10::intrusive_ptr<c10d::Store>& store,
                                           std::int64_t uuid) {
  return c10::make_intrusive<c10d::PrefixStore>(concat("reconfigure/", uuid), store);
}

constexpr const char* kClaim = "members";
constexpr const char* kRefused = "refused";  // by the instance that it holds, which had others

// That all who use this uuid mean the same members, of whom none has used it before.
void claim(const c10::intrusive_ptr<c10d::Store>& meeting, std::int64_t uuid,
           const Membership& membership) {
  const std::string own = std::to_string(membership.digest);
  StoreAdapter store(meeting);
  std::string claimed;
  try {
    claimed = store.set_first(kClaim, own);
    if (claimed != own) {
      store.set(kRefused, std::to_string(own_member(membership).instance));
    }
  } catch (...) {
    rethrow_translated();
  }
  TORCH_CHECK(
      claimed == own, "horon: reconfigure: uuid ", uuid, " was already used, for other ",
      "members or the same ones in another order. Give all members the same handles in the ",
      "same order, and a new uuid for each change.");
}

// Who has claimed the uuid would wait for a member that means another change by it.
void check_refused(const c10::intrusive_ptr<c10d::Store>& meeting, std::int64_t uuid,
                   const Membership& membership) {
  std::string refusing;
  try {
    if (!meeting->check({kRefused})) {
      return;
    }
    refusing = meeting->get_to_str(kRefused);
  } catch (const std::exception&) {
    return;  // what is asked of the store next says what is wrong with it
  }
  int rank = 0;
  for (const MemberHandle& member : membership.members) {
    if (std::to_string(member.instance) == refusing) {
      throw PeerLostError(
          concat("reconfigure: the process ", member.process.pid, ", which is rank ", rank,
                 " here, was given other handles with uuid ", uuid,
                 ", or the same ones in another order. Give all members the same ", "ones"));
    }
    ++rank;
  }
}

}  // namespace

ReconfigurableBackend::ReconfigurableBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size,
                                             const c10::intrusive_ptr<BackendOptions>& options,
                                             GlooMaker make_gloo)
    : HoronBackend(store, rank, size, options, std::move(make_gloo)), instance_(random_nonce()) {}

ReconfigurableBackend::ReconfigurableBackend(Empty /*tag*/,
                                             const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size,
                                             const c10::intrusive_ptr<BackendOptions>& options,
                                             GlooMaker make_gloo)
    : HoronBackend(WithoutMembers(), store, rank, size, options, std::move(make_gloo)),
      instance_(random_nonce()) {}

ReconfigurableBackend::~ReconfigurableBackend() {
  const WithoutGil no_gil;
  current_.reset();
}

c10d::ReconfigureHandle ReconfigurableBackend::get_reconfigure_handle() const {
  return own_handle(rank_, instance_).encode();
}

HoronBackend::WorkPtr ReconfigurableBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  TORCH_CHECK(fork_generation_ == fork_generation(), "horon: reconfigure: this process was forked ",
              "from the one that made the process group. A group can not be used across fork(); ",
              "create a new one in the child, or start children with spawn.");
  TORCH_CHECK_VALUE(!opts.timeout || opts.timeout->count() > 0,
                    "horon: reconfigure: timeout: ", "expected more than 0 ms, got ",
                    opts.timeout ? opts.timeout->count() : 0, ".");
  const WithoutGil no_gil;
  const int n_aborts = n_aborts_;
  const auto timeout = opts.timeout.value_or(options()->timeout);
  const std::unique_lock one_at_a_time(reconfiguring_, timeout);
  TORCH_CHECK(one_at_a_time.owns_lock(),
              "horon: reconfigure: another thread has been changing the ",
              "members of this group for ", timeout.count(), " ms.");
  const Membership membership = plan(opts, instance_);
  TORCH_CHECK(used_uuids_.find(opts.uuid) == used_uuids_.end(), "horon: reconfigure: uuid ",
              opts.uuid, " was already used by this group; each change needs a new one.");
  const auto meeting = meeting_of(store(), opts.uuid);
  claim(meeting, opts.uuid, membership);
  used_uuids_.insert(opts.uuid);

  auto its_options = c10::make_intrusive<BackendOptions>(*options());
  its_options->global_ranks_in_group.clear();  // numbered as they are here
  its_options->has_foreign_ranks = true;
  const MemberWatch watch(membership);
  Beginning beginning;
  beginning.hooks = hooks();
  beginning.meeting_timeout = opts.timeout;
  beginning.look_around = [&] {
    if (n_aborts_ != n_aborts) {
      throw GroupError("reconfigure: the process group was aborted meanwhile");
    }
    watch.check("it came to reconfigure()");
    check_refused(meeting, opts.uuid, membership);
  };
  const int size = static_cast<int>(membership.members.size());
  auto made = c10::make_intrusive<HoronBackend>(meeting, membership.rank, size, its_options,
                                                make_gloo(), std::move(beginning));

  {
    const std::lock_guard lock(current_mutex_);
    made.swap(current_);
    rank_ = membership.rank;
    size_ = size;
    is_reconfigured_ = true;
  }
  if (made) {
    made->leave();
  } else if (has_members()) {
    leave();
  }
  return c10::make_intrusive<FinishedWork>(rank_, c10d::OpType::UNKNOWN, 0,
                                           c10::ArrayRef<at::Tensor>());
}

HoronBackend* ReconfigurableBackend::find_current(c10::intrusive_ptr<HoronBackend>& held) const {
  if (!is_reconfigured_.load(std::memory_order_acquire)) {
    // The backend itself, as c10d's methods take it.
    return has_members() ? const_cast<ReconfigurableBackend*>(this) : nullptr;
  }
  const std::lock_guard lock(current_mutex_);
  held = current_;
  return held.get();
}

template <typename Pass>
auto ReconfigurableBackend::on_current(const char* operation, const Pass& pass) const {
  c10::intrusive_ptr<HoronBackend> held;
  HoronBackend* const current = find_current(held);
  TORCH_CHECK(current != nullptr, "horon: ", operation, ": this group has no members yet, because ",
              "it was made with enable_reconfigure=True. Exchange what ",
              "torch.distributed._get_reconfigure_handle() returns, and call ",
              "torch.distributed._reconfigure(uuid, handles) in all members first.");
  return pass(*current);
}

template <typename Pass>
void ReconfigurableBackend::if_members(const Pass& pass) const {
  c10::intrusive_ptr<HoronBackend> held;
  if (HoronBackend* const current = find_current(held)) {
    pass(*current);
  }
}

template <typename Pass, typename Value>
Value ReconfigurableBackend::on_current_or(const Pass& pass, Value without) const {
  c10::intrusive_ptr<HoronBackend> held;
  HoronBackend* const current = find_current(held);
  return current != nullptr ? pass(*current) : std::move(without);
}

HoronBackend::WorkPtr ReconfigurableBackend::broadcast(Tensors& tensors,
                                                       const c10d::BroadcastOptions& opts) {
  return on_current("broadcast",
                    [&](HoronBackend& to) { return to.HoronBackend::broadcast(tensors, opts); });
}

HoronBackend::WorkPtr ReconfigurableBackend::allreduce(Tensors& tensors,
                                                       const c10d::AllreduceOptions& opts) {
  return on_current("all_reduce",
                    [&](HoronBackend& to) { return to.HoronBackend::allreduce(tensors, opts); });
}

HoronBackend::WorkPtr ReconfigurableBackend::allreduce_sparse(Tensors& tensors,
                                                              const c10d::AllreduceOptions& opts) {
  return on_current("all_reduce", [&](HoronBackend& to) {
    return to.HoronBackend::allreduce_sparse(tensors, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return on_current("all_reduce_coalesced", [&](HoronBackend& to) {
    return to.HoronBackend::allreduce_coalesced(tensors, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::reduce(Tensors& tensors,
                                                    const c10d::ReduceOptions& opts) {
  return on_current("reduce",
                    [&](HoronBackend& to) { return to.HoronBackend::reduce(tensors, opts); });
}

HoronBackend::WorkPtr ReconfigurableBackend::allgather(std::vector<Tensors>& outputs,
                                                       Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  return on_current("all_gather", [&](HoronBackend& to) {
    return to.HoronBackend::allgather(outputs, inputs, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::AllgatherOptions& opts) {
  return on_current("all_gather_single", [&](HoronBackend& to) {
    return to.HoronBackend::_allgather_base(output, input, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return on_current("all_gather_coalesced", [&](HoronBackend& to) {
    return to.HoronBackend::allgather_coalesced(outputs, inputs, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return on_current("all_gather_single_coalesced", [&](HoronBackend& to) {
    return to.HoronBackend::allgather_into_tensor_coalesced(outputs, inputs, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::GatherOptions& opts) {
  return on_current(
      "gather", [&](HoronBackend& to) { return to.HoronBackend::gather(outputs, inputs, opts); });
}

HoronBackend::WorkPtr ReconfigurableBackend::gather_into_tensor(at::Tensor& output,
                                                                at::Tensor& input,
                                                                const c10d::GatherOptions& opts) {
  return on_current("gather_single", [&](HoronBackend& to) {
    return to.HoronBackend::gather_into_tensor(output, input, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                     const c10d::ScatterOptions& opts) {
  return on_current(
      "scatter", [&](HoronBackend& to) { return to.HoronBackend::scatter(outputs, inputs, opts); });
}

HoronBackend::WorkPtr ReconfigurableBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  return on_current("reduce_scatter", [&](HoronBackend& to) {
    return to.HoronBackend::reduce_scatter(outputs, inputs, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return on_current("reduce_scatter_single", [&](HoronBackend& to) {
    return to.HoronBackend::_reduce_scatter_base(output, input, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return on_current("reduce_scatter_single_coalesced", [&](HoronBackend& to) {
    return to.HoronBackend::reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                           std::vector<int64_t>& output_splits,
                                                           std::vector<int64_t>& input_splits,
                                                           const c10d::AllToAllOptions& opts) {
  return on_current("all_to_all_single", [&](HoronBackend& to) {
    return to.HoronBackend::alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllToAllOptions& opts) {
  return on_current("all_to_all", [&](HoronBackend& to) {
    return to.HoronBackend::alltoall(outputs, inputs, opts);
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::barrier(const c10d::BarrierOptions& opts) {
  return on_current("barrier", [&](HoronBackend& to) { return to.HoronBackend::barrier(opts); });
}

void ReconfigurableBackend::monitoredBarrier(const c10d::BarrierOptions& opts,
                                             bool wait_all_ranks) {
  return on_current("monitored_barrier", [&](HoronBackend& to) {
    return to.HoronBackend::monitoredBarrier(opts, wait_all_ranks);
  });
}

void ReconfigurableBackend::all_reduce_blocking(const at::Tensor& tensor,
                                                const c10d::ReduceOp& op) {
  return on_current("all_reduce_", [&](HoronBackend& to) {
    return to.HoronBackend::all_reduce_blocking(tensor, op);
  });
}

c10::intrusive_ptr<HoronBackend> ReconfigurableBackend::make_twin() {
  return on_current("a twin", [](HoronBackend& to) { return to.HoronBackend::make_twin(); });
}

std::weak_ptr<const void> ReconfigurableBackend::members() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::members(); },
                       std::weak_ptr<const void>());
}

bool ReconfigurableBackend::may_meet() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::may_meet(); }, false);
}

HoronBackend::WorkPtr ReconfigurableBackend::all_reduce_in_parts(const at::Tensor& tensor,
                                                                 const c10d::ReduceOp& op,
                                                                 std::shared_ptr<PartMaker> maker) {
  return on_current("all_reduce", [&](HoronBackend& to) {
    return to.HoronBackend::all_reduce_in_parts(tensor, op, std::move(maker));
  });
}

HoronBackend::WorkPtr ReconfigurableBackend::send(Tensors& tensors, int destination, int tag) {
  return on_current(
      "send", [&](HoronBackend& to) { return to.HoronBackend::send(tensors, destination, tag); });
}

HoronBackend::WorkPtr ReconfigurableBackend::recv(Tensors& tensors, int source, int tag) {
  return on_current("recv",
                    [&](HoronBackend& to) { return to.HoronBackend::recv(tensors, source, tag); });
}

HoronBackend::WorkPtr ReconfigurableBackend::recvAnysource(Tensors& tensors, int tag) {
  return on_current("recv",
                    [&](HoronBackend& to) { return to.HoronBackend::recvAnysource(tensors, tag); });
}

at::Tensor ReconfigurableBackend::allocateTensor(long size, at::TensorOptions options) {
  return on_current("allocate_tensor", [&](HoronBackend& to) {
    return to.HoronBackend::allocateTensor(size, options);
  });
}

void ReconfigurableBackend::startCoalescing() {
  return on_current("start_coalescing",
                    [&](HoronBackend& to) { return to.HoronBackend::startCoalescing(); });
}

HoronBackend::WorkPtr ReconfigurableBackend::endCoalescing() {
  return on_current("end_coalescing",
                    [&](HoronBackend& to) { return to.HoronBackend::endCoalescing(); });
}

c10::intrusive_ptr<c10d::Backend> ReconfigurableBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  return on_current("split",
                    [&](HoronBackend& to) { return to.HoronBackend::split(store, ranks, opts); });
}

c10::intrusive_ptr<c10d::Backend> ReconfigurableBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
    const int& rank, const int& size) {
  return on_current(
      "merge", [&](HoronBackend& to) { return to.HoronBackend::merge(store, opts, rank, size); });
}

c10::intrusive_ptr<c10d::Window> ReconfigurableBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  return on_current("new_window",
                    [&](HoronBackend& to) { return to.HoronBackend::new_window(tensor); });
}

c10::intrusive_ptr<c10d::Backend> ReconfigurableBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<Options>& opts_override) {
  return on_current("shrink", [&](HoronBackend& to) {
    return to.HoronBackend::shrink(ranks_to_exclude, shrink_flags, opts_override);
  });
}

void ReconfigurableBackend::prepare_shrink(const std::vector<int64_t>& ranks_to_exclude,
                                           std::chrono::milliseconds timeout) {
  on_current("shrink",
             [&](HoronBackend& to) { to.HoronBackend::prepare_shrink(ranks_to_exclude, timeout); });
}

bool ReconfigurableBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return on_current_or(
      [&](HoronBackend& to) { return to.HoronBackend::supportsTensorAlloc(device); }, false);
}

void ReconfigurableBackend::eagerConnectSingleDevice(at::Device device) {
  // Without members there is nobody to connect to; the first operation will.
  if_members([&](HoronBackend& to) { to.HoronBackend::eagerConnectSingleDevice(device); });
}

bool ReconfigurableBackend::supportsWindow() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::supportsWindow(); }, false);
}

bool ReconfigurableBackend::isInitialized() {
  return on_current_or([](HoronBackend&) { return true; }, false);
}

uint64_t ReconfigurableBackend::getSequenceNumberForGroup() {
  return on_current_or(
      [](HoronBackend& to) { return to.HoronBackend::getSequenceNumberForGroup(); }, uint64_t{0});
}

void ReconfigurableBackend::setTimeout(std::chrono::milliseconds timeout) {
  HoronBackend::setTimeout(timeout);  // what later members begin with
  if_members([&](HoronBackend& to) { to.HoronBackend::setTimeout(timeout); });
}

c10d::ErrorType ReconfigurableBackend::getError() {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::getError(); },
                       c10d::ErrorType::SUCCESS);
}

void ReconfigurableBackend::abort() {
  ++n_aborts_;
  if_members([](HoronBackend& to) { to.HoronBackend::abort(); });
}

void ReconfigurableBackend::shutdown() {
  if_members([](HoronBackend& to) { to.HoronBackend::shutdown(); });
}

bool ReconfigurableBackend::is_shared() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::is_shared(); }, false);
}

std::string ReconfigurableBackend::transport() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::transport(); },
                       std::string("none yet"));
}

bool ReconfigurableBackend::is_open() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::is_open(); }, true);
}

void ReconfigurableBackend::give_up(const std::string& reason) {
  if_members([&](HoronBackend& to) { to.HoronBackend::give_up(reason); });
}

std::vector<int> ReconfigurableBackend::ended_ranks() const {
  return on_current_or([](HoronBackend& to) { return to.HoronBackend::ended_ranks(); },
                       std::vector<int>());
}

}  // namespace horon::torch_backend

#endif
