#include "gradient_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>

#include "gradient_places.h"
#include "process_arena.h"

namespace horon::torch_backend {
namespace {

constexpr std::size_t kLeastExpectedBytes = 4096;
constexpr std::size_t kNothingExpected = std::numeric_limits<std::size_t>::max();

class GradientAllocator final : public c10::Allocator {
 public:
  explicit GradientAllocator(c10::Allocator* before) : before_(before) {
    before_deleter() = before->raw_deleter();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const bool may_be_expected = bytes >= least_.load(std::memory_order_relaxed);
    const bool may_have_a_place = may_have_place(bytes, c10::kCPU);
    if ((!may_be_expected && !may_have_a_place) ||
        torch::autograd::get_current_graph_task_id() == -1) {
      return before_->allocate(bytes);
    }
    if (may_have_a_place) {
      if (c10::DataPtr lent = lend_place(bytes, c10::kCPU)) {
        return lent;
      }
    }
    c10::DataPtr made =
        may_be_expected && is_expected(bytes) ? in_arena(bytes) : before_->allocate(bytes);
    if (may_have_a_place) {
      made_elsewhere(made.get());
    }
    return made;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }

  void expect(const std::vector<std::size_t>& sizes) {
    const std::lock_guard lock(mutex_);
    for (const std::size_t bytes : sizes) {
      if (bytes >= kLeastExpectedBytes) {
        ++expected_[bytes];
      }
    }
    update();
  }

  void forget(const std::vector<std::size_t>& sizes) {
    const std::lock_guard lock(mutex_);
    for (const std::size_t bytes : sizes) {
      const auto found = expected_.find(bytes);
      if (found != expected_.end() && --found->second == 0) {
        expected_.erase(found);
      }
    }
    update();
  }

 private:
  static c10::DeleterFnPtr& before_deleter() {
    static c10::DeleterFnPtr deleter = nullptr;
    return deleter;
  }

  c10::DataPtr in_arena(std::size_t bytes) {
    try {
      return arena_allocator()->allocate(bytes);
    } catch (const c10::Error&) {
      return before_->allocate(bytes);  // no room: reduced from elsewhere, with copies
    }
  }

  static void free_any(void* data) {
    if (is_in_arena(data)) {
      arena_allocator()->raw_deleter()(data);
    } else {
      before_deleter()(data);
    }
  }

  bool is_expected(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    return expected_.contains(bytes);
  }

  // Requires the lock.
  void update() {
    least_.store(expected_.empty() ? kNothingExpected : expected_.begin()->first,
                 std::memory_order_relaxed);
  }

  c10::Allocator* const before_;
  std::atomic<std::size_t> least_{
      kNothingExpected};  // the smallest expected: most calls need look no further
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> expected_;  // how often, by bytes. Guarded by mutex_.
};

GradientAllocator& installed() {
  // Never destroyed: storages that were made with it may outlive everything else.
  static GradientAllocator* const allocator = [] {
    auto* made = new GradientAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(made);
    return made;
  }();
  return *allocator;
}

}  // namespace

void expect_gradients(const std::vector<std::size_t>& bytes) { installed().expect(bytes); }

void wrap_cpu_allocator() { installed(); }

void forget_gradients(const std::vector<std::size_t>& bytes) { installed().forget(bytes); }

}  // namespace horon::torch_backend
