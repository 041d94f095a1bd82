#include "named_engine_host.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "core/error.h"
#include "core/log.h"
#include "cross/coordinator_meeting.h"
#include "cross/tcp_control_channel.h"
#include "group.h"
#include "interrupt.h"
#include "live_groups.h"
#include "own_post.h"
#include "process_arena.h"
#include "process_exit.h"
#include "shm/shm_control_channel.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

c10::intrusive_ptr<c10d::Store> with_prefix(const std::string& prefix,
                                            const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// A process set's group: its transport is what counts, its lane is never used.
class GroupLane final : public ProcessSetLane {
 public:
  GroupLane(std::shared_ptr<Group> group, std::unique_ptr<DeviceBatches> devices)
      : group_(std::move(group)), devices_(std::move(devices)) {}

  Transport& transport() override { return group_->transport(); }
  DeviceBatches* device_batches() override { return devices_.get(); }
  void shutdown() override { group_->shutdown(Deadline::after(std::chrono::milliseconds(0))); }
  void abort(const std::string& reason) override {
    group_->transport().abort(reason);
    if (devices_) {
      devices_->abort(reason);
    }
  }

 private:
  const std::shared_ptr<Group> group_;
  const std::unique_ptr<DeviceBatches> devices_;  // null without the GPU parts
};

std::shared_ptr<std::byte> make_private_buffer(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  HORON_CHECK(data != nullptr, "no memory for a fusion buffer of ", bytes, " bytes");
  return {static_cast<std::byte*>(data), [](std::byte* dying) { std::free(dying); }};
}

// In the arena, where the transport reduces in place; elsewhere if there is no room, which costs a
// copy.
std::shared_ptr<std::byte> make_buffer(std::size_t bytes) {
  const std::shared_ptr<Arena> arena = arena_access().own;
  if (!arena) {
    return make_private_buffer(bytes);
  }
  try {
    std::byte* data = arena->allocate(bytes);
    return {data, [arena](std::byte* dying) { arena->free(dying); }};
  } catch (const Error&) {
    return make_private_buffer(bytes);
  }
}

struct Control {
  std::unique_ptr<ControlChannel> channel;
  bool has_spare_cores = false;
  bool may_meet = false;
};

// Through memory where all ranks share it, else over TCP.
Control open_control(const c10::intrusive_ptr<c10d::Store>& store, const GroupIdentity& identity,
                     const Options& options, const NamedOptions& named,
                     std::function<void()> look_around) {
  StoreAdapter adapter(with_prefix("named/control", store), std::move(look_around));
  const WaitContext context{Deadline::after(named.timeout), interrupt_check()};
  if (auto shared =
          rendezvous(adapter, identity, ShmControlChannel::options(options), context.deadline)) {
    publish_own_post(*shared);
    const bool has_spare_cores = shared->peers.has_spare_cores;
    const bool may_meet = shared->peers.may_meet();
    return {std::make_unique<ShmControlChannel>(std::move(shared)), has_spare_cores, may_meet};
  }
  auto peers = meet_coordinator(adapter, identity.rank, identity.n_ranks, named.interfaces, context,
                                own_door());
  // Time spent waiting for a network is there to be used, however many cores there are.
  return {std::make_unique<TcpControlChannel>(identity.rank, identity.n_ranks, std::move(peers)),
          true, false};
}

// Throws the operation's error.
OperationPtr with_success(std::shared_ptr<NamedOperation> done) {
  if (done && done->error) {
    std::rethrow_exception(done->error);
  }
  return std::static_pointer_cast<TensorOperation>(std::move(done));
}

void tell_about_knobs() {
  static std::once_flag told;
  std::call_once(told, [] {
    for (const std::string& line : knobs_without_meaning()) {
      log_warning(line);
    }
  });
}

}  // namespace

NamedEngineHost::NamedEngineHost(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 std::chrono::milliseconds timeout, GlooMaker make_gloo,
                                 const std::vector<int>& watched_ranks)
    : rank_(rank), size_(size), cuda_(NamedCuda::make()) {
  if (rank == 0) {
    tell_about_knobs();
  }
  const Options options = Options::from_environment();
  NamedOptions named = NamedOptions::from_environment();
  named.timeout = timeout;
  GroupIdentity identity{rank, size, {}};
  for (int peer = 0; peer < size; ++peer) {
    identity.global_ranks.push_back(peer);
  }
  NamedEngine::Parts parts;
  parts.rank = rank;
  parts.n_ranks = size;
  // Once there is a control channel, it tells who has died.
  const auto look_around = LiveGroups::checker(watched_ranks, "hvd.init() was done");
  Control control = open_control(store, identity, options, named, look_around);
  has_spare_cores_ = control.has_spare_cores;
  parts.channel = std::move(control.channel);
  parts.make_buffer = make_buffer;
  parts.has_spare_cores = has_spare_cores_;
  parts.may_meet = control.may_meet;
  parts.check_interrupt = interrupt_check();
  parts.make_lane =
      [store, rank, options, timeout, cuda = cuda_, make_gloo = std::move(make_gloo)](
          int id, const std::vector<int>& ranks,
          const std::function<void()>& look_around) -> std::unique_ptr<ProcessSetLane> {
    const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    const GroupIdentity members{static_cast<int>(place), static_cast<int>(ranks.size()), ranks};
    const auto own_store = with_prefix(concat("named/set", id), store);
    auto group = Group::make(own_store, members, options, timeout, make_gloo, look_around);
    return std::make_unique<GroupLane>(
        std::move(group), cuda->make_batches(own_store, id, members.rank, members.n_ranks));
  };
  engine_ = std::make_unique<NamedEngine>(std::move(parts), named);
}

NamedEngineHost::~NamedEngineHost() {
  if (fork_generation_ != fork_generation()) {
    (void)engine_.release();
  }
}

NamedEngine& NamedEngineHost::engine() const {
  if (fork_generation_ != fork_generation()) {
    throw UsageError(
        "this process was forked from the one that called init(), and is no rank of its own. What "
        "talks to other ranks belongs into that one; start more ranks with torchrun or spawn.");
  }
  return *engine_;
}

SetView NamedEngineHost::view(int process_set) const {
  return {process_set, engine().process_set_ranks(process_set), rank_};
}

std::uint64_t NamedEngineHost::submit(const OperationPtr& operation, bool will_wait) {
  NamedEngine& running = engine();
  if (operation->request->device == DeviceKind::kCuda) {
    cuda_->begin(*operation);
  }
  return running.submit(operation, will_wait);
}

std::optional<std::uint64_t> NamedEngineHost::try_submit(const OperationPtr& operation,
                                                         bool will_wait) {
  if (operation->request->device != DeviceKind::kCpu) {
    return std::nullopt;
  }
  return engine().try_submit(operation, will_wait);
}

bool NamedEngineHost::poll(std::uint64_t handle) { return engine().poll(handle); }

OperationPtr NamedEngineHost::make_allreduce(int process_set, const at::Tensor& tensor,
                                             const at::Tensor& output, std::string_view name,
                                             const Reduced& how) {
  if (tensor.layout() != c10::kStrided) {
    throw UsageError(concat("Tensor type ", tensor.toString(), " with layout ",
                            c10::str(tensor.layout()), " is not supported."));
  }
  if (!tensor.is_contiguous()) {
    throw UsageError("Tensor is required to be contiguous.");
  }
  if (const RequestPtr known = recent_.find(name, tensor, how, process_set)) {
    if (OperationPtr again = named_allreduce_again(known, tensor, output)) {
      return again;
    }
  }
  OperationPtr operation =
      named_allreduce(view(process_set), {tensor}, {output}, {std::string(name)}, how);
  operation->returns_tensor = true;
  recent_.keep(operation->request);
  return operation;
}

OperationPtr NamedEngineHost::take(std::uint64_t handle) {
  const InterruptScope interrupts;
  auto done = engine().wait(handle, interrupt_check());
  stay_if_process_exits();
  interrupts.rethrow();
  return with_success(std::move(done));
}

void NamedEngineHost::meet(std::uint64_t handle) {
  const InterruptScope interrupts;
  engine().meet(handle, interrupt_check());
  stay_if_process_exits();
  interrupts.rethrow();
}

OperationPtr NamedEngineHost::try_take(std::uint64_t handle) {
  return with_success(engine().try_wait(handle));
}

TensorList NamedEngineHost::wait(std::uint64_t handle) {
  const OperationPtr done = take(handle);
  if (!done) {
    throw UsageError(unknown_handle(handle));
  }
  return done->take_results();
}

void NamedEngineHost::start_timeline(const std::string& path, bool mark_cycles) {
  if (rank_ == 0) {
    engine().timeline().start(path, rank_, mark_cycles);
  }
}

std::uint64_t NamedEngineHost::join(int device) {
  cuda_->set_default_device(device);
  return submit(named_signal(NamedKind::kJoin, 0, kJoinName), false);
}

std::uint64_t NamedEngineHost::barrier(int process_set) {
  const SetView set = view(process_set);
  if (!std::binary_search(set.ranks.begin(), set.ranks.end(), rank_)) {
    throw UsageError(concat("BARRIER: rank ", rank_, " is not in process set ", process_set, '.'));
  }
  const std::string name = concat("horon.barrier.", process_set);
  return submit(
      named_signal(NamedKind::kBarrier, process_set, concat(name, '.', engine().next_number(name))),
      false);
}

int NamedEngineHost::change_sets(const OperationPtr& operation) {
  wait(submit(operation, true));
  return operation->value;
}

int NamedEngineHost::add_process_set(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty() || ranks.front() < 0 || ranks.back() >= size_ ||
      std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end()) {
    throw UsageError(
        concat("a process set consists of different ranks between 0 and ", size_ - 1, '.'));
  }
  const std::string name = "horon.process_set.add";
  return change_sets(named_signal(NamedKind::kAddProcessSet, 0,
                                  concat(name, '.', engine().next_number(name)), ranks));
}

bool NamedEngineHost::remove_process_set(int id) {
  const std::vector<int> known = engine().process_sets();
  if (id == 0 || std::find(known.begin(), known.end(), id) == known.end()) {
    return false;
  }
  const std::string name = "horon.process_set.remove";
  change_sets(named_signal(NamedKind::kRemoveProcessSet, 0,
                           concat(name, '.', engine().next_number(name)), {}, id));
  recent_.clear();  // whose process set would not be looked at again
  return true;
}

}  // namespace horon::torch_backend
