// GPUs of ranks that are threads of this process: each queues the plans of its batches, and they
// are carried out on host memory when all ranks have queued theirs, and the test lets them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "named/device_batches.h"
#include "nccl/named_batch_plan.h"
#include "nccl_simulation.h"
#include "pack_on_host.h"

namespace horon::testing {

// An operation whose tensors "lie on a GPU": int32, which is what the simulation can add up.
struct GpuOperation final : NamedOperation {
  GpuOperation(NamedKind kind, const std::string& name, std::vector<std::int32_t> values,
               int process_set = 0, NamedOp op = NamedOp::kSum)
      : data(std::move(values)) {
    auto made = std::make_shared<NamedRequest>();
    made->kind = kind;
    made->op = op;
    made->process_set = process_set;
    made->device = DeviceKind::kCuda;
    made->tensors.resize(1);
    made->tensors[0].name = name;
    made->tensors[0].dtype = DType::kInt32;
    const bool any_rows = kind == NamedKind::kAllGather || kind == NamedKind::kAllToAll;
    made->tensors[0].shape = {any_rows ? -1 : static_cast<std::int64_t>(data.size())};
    editable = made;
    request = made;
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    Tensor view;
    view.input = {bytes, data.size() * sizeof(std::int32_t)};
    if (!any_rows) {
      view.output = {bytes, data.size() * sizeof(std::int32_t)};
    }
    tensors.push_back(view);
    rows = {static_cast<std::int64_t>(data.size())};
  }

  Span allocate(std::size_t /*index*/, std::int64_t n) override {
    result.assign(static_cast<std::size_t>(n), -1);
    return {reinterpret_cast<std::byte*>(result.data()), result.size() * sizeof(std::int32_t)};
  }

  bool has_come() const override { return came->load(); }

  std::vector<std::int32_t> data;
  std::vector<std::int32_t> result;
  std::shared_ptr<NamedRequest> editable;  // before it is submitted
  std::shared_ptr<std::atomic<bool>> came = std::make_shared<std::atomic<bool>>(false);
};

// What one rank has queued as its n-th batch.
struct QueuedBatch {
  NamedBatchPlan plan;
  std::vector<std::shared_ptr<std::byte>> scratch;
  std::vector<std::shared_ptr<std::atomic<bool>>> came;  // of its operations
};

// The GPUs of a process set. Thread safety: all methods.
class FakeGpus {
 public:
  explicit FakeGpus(int n_ranks) : queues_(static_cast<std::size_t>(n_ranks)) {}

  void queue(int rank, QueuedBatch batch) {
    const std::lock_guard lock(mutex_);
    queues_[static_cast<std::size_t>(rank)].push_back(std::move(batch));
    run_what_is_complete();
  }

  // Keeps what is queued from being carried out.
  void hold() {
    const std::lock_guard lock(mutex_);
    is_held_ = true;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    is_held_ = false;
    run_what_is_complete();
  }

  std::size_t n_queued(int rank) const {
    const std::lock_guard lock(mutex_);
    return queues_[static_cast<std::size_t>(rank)].size();
  }
  std::size_t n_calls() const {
    const std::lock_guard lock(mutex_);
    return n_calls_;
  }

 private:
  void run_what_is_complete() {
    while (!is_held_ && std::all_of(queues_.begin(), queues_.end(),
                                    [](const auto& queue) { return !queue.empty(); })) {
      std::vector<QueuedBatch> batches;
      std::vector<NcclPlan> calls;
      for (auto& queue : queues_) {
        batches.push_back(std::move(queue.front()));
        queue.pop_front();
        const NamedBatchPlan& plan = batches.back().plan;
        for (const Span& span : plan.zeros) {
          std::memset(span.data, 0, span.bytes);
        }
        run_on_host(plan.before);
        calls.push_back({{}, plan.calls, {}});
      }
      n_calls_ += calls.front().calls.size();
      if (!calls.front().calls.empty()) {
        NcclSimulation(std::move(calls)).run();
      }
      for (const QueuedBatch& batch : batches) {
        run_on_host(batch.plan.after);
        for (const auto& came : batch.came) {
          came->store(true);
        }
      }
    }
  }

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<std::deque<QueuedBatch>> queues_;  // by rank
  bool is_held_ = false;
  std::size_t n_calls_ = 0;
};

class FakeDeviceBatches final : public DeviceBatches {
 public:
  FakeDeviceBatches(std::shared_ptr<FakeGpus> gpus, int rank, int n_ranks)
      : gpus_(std::move(gpus)), rank_(rank), n_ranks_(n_ranks) {}

  std::string refusal() override { return gpus_ ? "" : "there is none"; }

  void run(const DeviceBatch& batch, const WaitContext& context) override {
    HORON_CHECK(!is_aborted, "it was aborted");
    while (waits_for_others) {
      HORON_CHECK(!context.deadline.has_passed(), "nobody told it to give up");
      (*context.check_interrupt)();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    QueuedBatch queued;
    const auto make_scratch = [&](std::size_t bytes) {
      auto* memory = static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
      std::memset(memory, 0x5A, bytes);
      queued.scratch.emplace_back(memory, [](std::byte* data) { std::free(data); });
      return memory;
    };
    NamedBatchPlace place;
    place.rank = rank_;
    place.n_ranks = n_ranks_;
    queued.plan = plan_named_batch(batch, place, make_scratch);
    for (const BatchTensor& tensor : batch.tensors) {
      if (tensor.operation) {
        queued.came.push_back(static_cast<GpuOperation&>(*tensor.operation).came);
      }
    }
    pending_.push_back(queued.came);
    gpus_->queue(rank_, std::move(queued));
  }

  DeviceFailure check() override {
    std::erase_if(pending_, [](const auto& batch) {
      return std::ranges::all_of(batch, [](const auto& came) { return came->load(); });
    });
    return {fails ? "the GPU has fallen off the bus" : "", true};
  }
  std::size_t n_under_way() const override { return pending_.size() + (fails ? 1 : 0); }
  bool shutdown() override { return true; }
  void abort(const std::string& /*reason*/) override { is_aborted = true; }

  std::atomic<bool> fails{false};
  std::atomic<bool> waits_for_others{false};  // who never come
  std::atomic<bool> is_aborted{false};

 private:
  const std::shared_ptr<FakeGpus> gpus_;  // null: this process has none
  const int rank_;
  const int n_ranks_;
  std::vector<std::vector<std::shared_ptr<std::atomic<bool>>>> pending_;  // by batch
};

}  // namespace horon::testing
