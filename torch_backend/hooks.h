// Functions that others want called: when an operation has completed, and before a group ends in
// error.
//
// Thread safety: all methods. Hooks are called with no lock held, as torch's contract wants.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace horon::torch_backend {

template <typename... Args>
class HookTable {
 public:
  using Hook = std::function<void(Args...)>;

  void add(std::int64_t id, Hook hook) {
    const std::lock_guard lock(mutex_);
    hooks_[id] = std::move(hook);
    count_.store(hooks_.size(), std::memory_order_relaxed);
  }

  void remove(std::int64_t id) {
    const std::lock_guard lock(mutex_);
    hooks_.erase(id);
    count_.store(hooks_.size(), std::memory_order_relaxed);
  }

  // Relaxed: hooks are added while a group is made, before it is used.
  bool is_empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  void call_all(Args... args) const {
    if (is_empty()) {
      return;
    }
    std::vector<Hook> hooks;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [id, hook] : hooks_) {
        hooks.push_back(hook);
      }
    }
    for (const Hook& hook : hooks) {
      hook(args...);
    }
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::int64_t, Hook> hooks_;  // guarded by mutex_
  std::atomic<std::size_t> count_{0};   // of hooks_, to be read without the mutex
};

// What works and groups share of a backend. Shared ownership: a Work may outlive the backend.
struct Hooks {
  HookTable<std::uint64_t> on_completion;  // the argument is the Work's completion key
  HookTable<> on_abort;
};

}  // namespace horon::torch_backend
