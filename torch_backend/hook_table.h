// A table of functions that others want called.
//
// Thread safety: all methods. Hooks are called with no lock held, as torch's contract wants.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace horon::torch_backend {

template <typename... Args>
class HookTable {
 public:
  using Hook = std::function<void(Args...)>;

  void add(std::int64_t id, Hook hook) {
    change([&](Table& table) { table[id] = std::move(hook); });
  }

  void remove(std::int64_t id) {
    change([&](Table& table) { table.erase(id); });
  }

  // Relaxed: hooks are added while a group is made, before it is used.
  bool is_empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  void call_all(Args... args) const {
    if (is_empty()) {
      return;
    }
    std::shared_ptr<const Table> hooks;
    {
      const std::lock_guard lock(mutex_);
      hooks = hooks_;
    }
    for (const auto& [id, hook] : *hooks) {
      try {
        hook(args...);
      } catch (const std::exception& error) {
        // Whoever comes by here has an operation to end, on a thread of its own or a user's.
        log_warning(concat("a hook of a process group raised an exception: ", error.what()));
      }
    }
  }

 private:
  using Table = std::map<std::int64_t, Hook>;

  template <typename Change>
  void change(const Change& change) {
    std::shared_ptr<const Table> old;  // goes without the lock: what hooks hold may be anything
    const std::lock_guard lock(mutex_);
    auto table = hooks_ ? std::make_shared<Table>(*hooks_) : std::make_shared<Table>();
    change(*table);
    count_.store(table->size(), std::memory_order_relaxed);
    old = std::exchange(hooks_, std::move(table));
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const Table> hooks_;  // guarded by mutex_; replaced, never changed
  std::atomic<std::size_t> count_{0};   // of hooks_, to be read without the mutex
};

}  // namespace horon::torch_backend
