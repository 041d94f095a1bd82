#include "gradient_cuda_allocator.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "gradient_loan.h"
#include "gradient_places.h"

namespace horon::torch_backend {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Every function but the first few only passes on; a test compares the list with torch's header.
// Those without `override` are not in every version of torch.
class GradientCudaAllocator final : public caching::CUDAAllocator {
 public:
  explicit GradientCudaAllocator(caching::CUDAAllocator* before) : before_(before) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (!may_have_place(bytes, c10::kCUDA) || torch::autograd::get_current_graph_task_id() == -1 ||
        n_routes_.load(std::memory_order_relaxed) > 0) {
      return before_->allocate(bytes);
    }
    const c10::Device device(c10::kCUDA, c10::cuda::current_device());
    if (c10::DataPtr lent = lend_place(bytes, device)) {
      return lent;
    }
    c10::DataPtr made = before_->allocate(bytes);
    made_elsewhere(made.get());
    return made;
  }

  // torch compares this with what ordinary memory has; what is lent has its own.
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }

  void recordStream(const c10::DataPtr& pointer, c10::cuda::CUDAStream stream) override {
    if (GradientLoan* const loan = GradientLoan::of(pointer)) {
      before_->recordStream(leave_place(*loan).data_ptr(), stream);
    } else {
      before_->recordStream(pointer, stream);
    }
  }

  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    before_->beginAllocateToPool(device, pool, std::move(filter));
    const std::lock_guard lock(mutex_);
    routes_.emplace(device, pool);
    n_routes_.store(routes_.size(), std::memory_order_relaxed);
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    {
      const std::lock_guard lock(mutex_);
      // It may have begun before this allocator was there.
      if (const auto found = routes_.find({device, pool}); found != routes_.end()) {
        routes_.erase(found);
      }
      n_routes_.store(routes_.size(), std::memory_order_relaxed);
    }
    before_->endAllocateToPool(device, pool);
  }

  // What c10::Allocator and c10::DeviceAllocator have.
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return before_->is_simple_data_ptr(pointer);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }
  bool initialized() override { return before_->initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { before_->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return before_->getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    before_->resetAccumulatedStats(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override { before_->resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return before_->getMemoryInfo(device);
  }

  // What CUDAAllocator has.
  void* raw_alloc(std::size_t bytes) override { return before_->raw_alloc(bytes); }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    return before_->raw_alloc_with_stream(bytes, stream);
  }
  void raw_delete(void* address) override { before_->raw_delete(address); }
  void init(int n_devices) override { before_->init(n_devices); }
  double getMemoryFraction(c10::DeviceIndex device) override {
    return before_->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    before_->setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override {
    return before_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { before_->enable(value); }
  bool isEnabled() const override { return before_->isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override {
    before_->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* address, std::size_t* bytes) override {
    return before_->getBaseAllocation(address, bytes);
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override {
    return before_->snapshot(pool, include_traces);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    before_->releasePool(device, pool);
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return before_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<caching::CUDAAllocator> allocator) override {
    before_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use) override {
    before_->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    before_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return before_->checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* address) override {
    return before_->shareIpcHandle(address);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return before_->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return before_->isHistoryEnabled(); }
  void recordHistory(bool is_enabled, caching::CreateContextFn recorder, std::size_t most_entries,
                     caching::RecordContext when, bool clears,
                     const std::vector<std::string>& skipped) override {
    before_->recordHistory(is_enabled, recorder, most_entries, when, clears, skipped);
  }
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>>& annotation) override {
    before_->recordAnnotation(annotation);
  }
  void pushCompileContext(std::string& context) override { before_->pushCompileContext(context); }
  void popCompileContext() override { before_->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { before_->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return before_->getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    before_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    before_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex other) override {
    before_->enablePeerAccess(device, other);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device,
                          std::size_t bytes, cudaStream_t stream, bool is_peer_enabled) override {
    return before_->memcpyAsync(to, to_device, from, from_device, bytes, stream, is_peer_enabled);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                              c10::MempoolId_t pool) override {
    return before_->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override {
    return before_->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return before_->name(); }

  // What newer versions have; in an older one nobody calls it.
  virtual void markCaptureBegin(c10::DeviceIndex device) {
    [&](auto* before) {
      if constexpr (requires { before->markCaptureBegin(device); }) {
        before->markCaptureBegin(device);
      }
    }(before_);
  }
  virtual void markCaptureEnd(c10::DeviceIndex device) {
    [&](auto* before) {
      if constexpr (requires { before->markCaptureEnd(device); }) {
        before->markCaptureEnd(device);
      }
    }(before_);
  }
  virtual std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address) {
    return [&](auto* before) -> std::shared_ptr<c10::GatheredContext> {
      if constexpr (requires { before->getContextForPointer(address); }) {
        return before->getContextForPointer(address);
      }
      return nullptr;
    }(before_);
  }
  virtual bool supportsUserMetadata() {
    return [](auto* before) -> bool {
      if constexpr (requires { before->supportsUserMetadata(); }) {
        return before->supportsUserMetadata();
      }
      return false;
    }(before_);
  }
  virtual void annotateMemory(const void* address, const std::string& metadata) {
    [&](auto* before) {
      if constexpr (requires { before->annotateMemory(address, metadata); }) {
        before->annotateMemory(address, metadata);
      }
    }(before_);
  }
  virtual void attachOomRejectionObserver(
      std::function<void(std::int64_t, std::size_t, std::size_t, std::size_t)> observer) {
    [&](auto* before) {
      if constexpr (requires { before->attachOomRejectionObserver(observer); }) {
        before->attachOomRejectionObserver(std::move(observer));
      }
    }(before_);
  }
  virtual c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) {
    return [&](auto* before) -> c10::DataPtr {
      if constexpr (requires { before->allocateWithAddress(bytes, address); }) {
        return before->allocateWithAddress(bytes, address);
      }
      return {};
    }(before_);
  }

 private:
  caching::CUDAAllocator* const before_;
  std::mutex mutex_;
  std::multiset<std::pair<c10::DeviceIndex, c10::MempoolId_t>> routes_;  // open; guarded by mutex_
  std::atomic<std::size_t> n_routes_{0};
};

}  // namespace

void wrap_cuda_allocator() {
  // Never destroyed: storages that were made with it may outlive everything else.
  static const bool is_wrapped = [] {
    caching::allocator.store(new GradientCudaAllocator(caching::allocator.load()));
    return true;
  }();
  (void)is_wrapped;
}

}  // namespace horon::torch_backend
