// Engines of named operations with ranks as threads, over real shared memory.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cross/coordinator_meeting.h"
#include "cross/tcp_control_channel.h"
#include "fake_gpus.h"
#include "named/named_engine.h"
#include "rank_threads.h"
#include "shm/shm_control_channel.h"
#include "shm/shm_transport.h"

namespace horon::testing {

class PrefixedStore final : public Store {
 public:
  PrefixedStore(Store* store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(prefix_ + key, value);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return store_->get(prefix_ + key, deadline);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_->add(prefix_ + key, amount);
  }

 private:
  Store* const store_;
  const std::string prefix_;
};

class TestLane final : public ProcessSetLane {
 public:
  explicit TestLane(std::unique_ptr<SharedGroup> group,
                    std::shared_ptr<FakeDeviceBatches> gpu = nullptr)
      : group_(std::move(group)),
        transport_(&group_->segment, &group_->peers, &group_->arenas),
        gpu_(std::move(gpu)) {}
  Transport& transport() override { return transport_; }
  DeviceBatches* device_batches() override { return gpu_.get(); }
  void shutdown() override { transport_.depart(); }
  void abort(const std::string& reason) override {
    transport_.abort(reason);
    if (gpu_) {
      gpu_->abort(reason);
    }
  }

 private:
  const std::unique_ptr<SharedGroup> group_;
  ShmTransport transport_;
  const std::shared_ptr<FakeDeviceBatches> gpu_;
};

// The GPU of a process set's member; null: none.
using GpuMaker = std::function<std::shared_ptr<FakeDeviceBatches>(int set, int place, int n_ranks)>;

// Called before a process set's lane is made; may throw.
using BeforeLane = std::function<void(int set, const std::function<void()>& look_around)>;

// What carries the engines' messages. Restless: as kShm, but somebody who waits sees something
// happen all the time, as beside other ranks' traffic that never stops.
enum class ControlKind : std::uint8_t { kShm, kTcp, kRestless };

class RestlessChannel final : public ControlChannel {
 public:
  explicit RestlessChannel(std::unique_ptr<ControlChannel> inner) : inner_(std::move(inner)) {}

  bool spin(std::uint32_t /*seen*/) override { return true; }
  bool linger(std::uint32_t /*seen*/, std::chrono::nanoseconds /*limit*/) override { return true; }
  bool pause(std::uint32_t /*seen*/) override { return true; }

  void send(int rank, Bytes bytes, bool is_urgent) override {
    inner_->send(rank, std::move(bytes), is_urgent);
  }
  bool flush() override { return inner_->flush(); }
  bool receive(int* source, Bytes* bytes) override { return inner_->receive(source, bytes); }
  std::uint32_t events() const override { return inner_->events(); }
  void sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) override {
    inner_->sleep(sleeper, seen, limit);
  }
  void wake() override { inner_->wake(); }
  void attend() override { inner_->attend(); }
  void leave_to_background(bool only_urgent) override { inner_->leave_to_background(only_urgent); }
  void give_up_meeting(std::uint32_t meeting) override { inner_->give_up_meeting(meeting); }
  std::uint32_t given_up_meeting() const override { return inner_->given_up_meeting(); }
  bool is_poisoned() override { return inner_->is_poisoned(); }
  std::string failure() override { return inner_->failure(); }
  bool has_departed(int rank) override { return inner_->has_departed(rank); }
  void poison(const std::string& reason) override { inner_->poison(reason); }
  void depart() override { inner_->depart(); }

 private:
  const std::unique_ptr<ControlChannel> inner_;
};

inline std::unique_ptr<ControlChannel> make_channel(ControlKind kind, Store& store, int rank,
                                                    int n_ranks) {
  PrefixedStore control(&store, "control/");
  if (kind == ControlKind::kTcp) {
    return std::make_unique<TcpControlChannel>(
        rank, n_ranks, meet_coordinator(control, rank, n_ranks, "lo", patient_context()));
  }
  auto channel = std::make_unique<ShmControlChannel>(
      rendezvous(control, identity_of(rank, n_ranks), ShmControlChannel::options({}), patient()));
  if (kind == ControlKind::kRestless) {
    return std::make_unique<RestlessChannel>(std::move(channel));
  }
  return channel;
}

inline std::unique_ptr<NamedEngine> make_engine(Store& store, int rank, int n_ranks,
                                                const NamedOptions& named = {},
                                                ControlKind control = ControlKind::kShm,
                                                const GpuMaker& make_gpu = nullptr,
                                                const BeforeLane& before_lane = nullptr) {
  NamedEngine::Parts parts;
  parts.rank = rank;
  parts.n_ranks = n_ranks;
  parts.channel = make_channel(control, store, rank, n_ranks);
  parts.may_meet = control == ControlKind::kShm;
  parts.make_lane = [&store, rank, make_gpu, before_lane](
                        int id, const std::vector<int>& ranks,
                        const std::function<void()>& look_around) {
    if (before_lane) {
      before_lane(id, look_around);
    }
    PrefixedStore own(&store, concat("set", id, '/'));
    const auto place =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    const auto n_members = static_cast<int>(ranks.size());
    return std::make_unique<TestLane>(
        rendezvous(own, identity_of(place, n_members), small_options(), patient()),
        make_gpu ? make_gpu(id, place, n_members) : nullptr);
  };
  parts.make_buffer = [](std::size_t bytes) {
    return std::shared_ptr<std::byte>(
        static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)),
        [](std::byte* data) { std::free(data); });
  };
  return std::make_unique<NamedEngine>(std::move(parts), named);
}

// An operation on floats, in place where sizes allow it.
struct FloatOperation final : NamedOperation {
  FloatOperation(NamedKind kind, const std::string& name, std::vector<float> values,
                 int process_set = 0, NamedOp op = NamedOp::kSum)
      : data(std::move(values)) {
    auto made = std::make_shared<NamedRequest>();
    made->kind = kind;
    made->op = op;
    made->process_set = process_set;
    made->tensors.resize(1);
    made->tensors[0].name = name;
    const bool any_rows = kind == NamedKind::kAllGather || kind == NamedKind::kAllToAll;
    made->tensors[0].shape = {any_rows ? -1 : static_cast<std::int64_t>(data.size())};
    editable = made;
    request = made;
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    Tensor view;
    view.input = {bytes, data.size() * sizeof(float)};
    if (!any_rows) {
      view.output = {bytes, data.size() * sizeof(float)};
    }
    tensors.push_back(view);
    rows = {static_cast<std::int64_t>(data.size())};
  }

  Span allocate(std::size_t /*index*/, std::int64_t n) override {
    result.resize(static_cast<std::size_t>(n));
    allocated_by = std::this_thread::get_id();
    return {reinterpret_cast<std::byte*>(result.data()), result.size() * sizeof(float)};
  }

  std::vector<float> data;
  std::vector<float> result;
  std::thread::id allocated_by;            // whoever carried it out
  std::shared_ptr<NamedRequest> editable;  // before it is submitted
};

inline std::shared_ptr<FloatOperation> named_all_reduce(const std::string& name,
                                                        std::vector<float> values,
                                                        int process_set = 0) {
  return std::make_shared<FloatOperation>(NamedKind::kAllReduce, name, std::move(values),
                                          process_set);
}

struct SignalOperation final : NamedOperation {
  SignalOperation(NamedKind kind, const std::string& name, std::vector<std::int32_t> ranks = {},
                  int process_set = 0, int root = 0) {
    auto made = std::make_shared<NamedRequest>();
    made->kind = kind;
    made->process_set = process_set;
    made->ranks = std::move(ranks);
    made->root = root;
    made->tensors.resize(1);
    made->tensors[0].name = name;
    request = made;
    tensors.resize(1);
  }
};

inline std::string error_text(const NamedOperation& operation) {
  return operation.error ? text_of(operation.error) : std::string();
}

// Submits and waits.
inline void complete(NamedEngine& engine, const std::shared_ptr<NamedOperation>& operation,
                     bool will_wait = true) {
  engine.wait(engine.submit(operation, will_wait), nullptr);
}

inline void must_complete(NamedEngine& engine, const std::shared_ptr<NamedOperation>& operation) {
  complete(engine, operation);
  expect(!operation->error, operation->request->name(), ": ", error_text(*operation));
}

}  // namespace horon::testing
