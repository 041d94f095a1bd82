// Functions that others want called: when an operation has completed, and before a group ends in
// error.
//
// Thread safety: all methods. Hooks are called with no lock held, as torch's contract wants.
#pragma once

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
  }

  void remove(std::int64_t id) {
    const std::lock_guard lock(mutex_);
    hooks_.erase(id);
  }

  void call_all(Args... args) const {
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
};

// What works and groups share of a backend. Shared ownership: a Work may outlive the backend.
struct Hooks {
  HookTable<std::uint64_t> on_completion;  // the argument is the Work's completion key
  HookTable<> on_abort;
};

}  // namespace horon::torch_backend
