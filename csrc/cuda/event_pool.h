// Events that are used again and again: making one costs several microseconds.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/event.h"

namespace horon {

// Thread safety: any thread may acquire, and any may let go of an event.
class EventPool {
  // Leases hold it too: a Work may outlive its group.
  struct State {
    std::mutex mutex;
    std::vector<Event> idle;  // guarded by mutex
  };

 public:
  // An event that goes back to its pool when it is destroyed. By then nobody may still call
  // is_done() for it; streams that were told to wait have noted what for.
  class Lease {
   public:
    Lease(Lease&&) noexcept = default;
    Lease& operator=(Lease&& other) noexcept {
      if (this != &other) {
        give_back();
        state_ = std::move(other.state_);
        event_ = std::move(other.event_);
      }
      return *this;
    }
    ~Lease() { give_back(); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const Event& operator*() const { return event_; }
    const Event* operator->() const { return &event_; }

   private:
    friend class EventPool;
    Lease(std::shared_ptr<State> state, Event event)
        : state_(std::move(state)), event_(std::move(event)) {}

    void give_back() noexcept {
      if (state_) {
        const std::lock_guard lock(state_->mutex);
        state_->idle.push_back(std::move(event_));
      }
      state_.reset();
    }

    std::shared_ptr<State> state_;  // null after a move
    Event event_;
  };

  explicit EventPool(int device) : device_(device), state_(std::make_shared<State>()) {}

  // Throws CudaError where a new event is needed and can not be made.
  Lease acquire() {
    {
      const std::lock_guard lock(state_->mutex);
      if (!state_->idle.empty()) {
        Event event = std::move(state_->idle.back());
        state_->idle.pop_back();
        return {state_, std::move(event)};
      }
    }
    return {state_, Event(device_)};
  }

 private:
  const int device_;
  const std::shared_ptr<State> state_;
};

}  // namespace horon
