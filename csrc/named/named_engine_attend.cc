// NamedEngine: who attends, and when threads sleep. See Note [Attending].

#include "core/error.h"
#include "core/thread_name.h"
#include "named/named_engine.h"

namespace horon {

using Sleeper = ControlChannel::Sleeper;

namespace {

// The background thread with nothing to wait for.
constexpr std::chrono::hours kForever{24};

}  // namespace

bool NamedEngine::attend_until(FunctionRef<bool()> is_done, const Deadline* deadline,
                               InterruptCheck check_interrupt) {
  std::unique_lock lock(mutex_);
  if (is_done()) {
    return true;
  }
  if (is_inside_wait()) {
    throw GroupError(
        "called in the middle of another operation, on the same thread, by a signal handler: it "
        "would wait for itself. Set a flag in the handler, and act on it later.");
  }
  const auto is_late = [&] { return deadline != nullptr && deadline->has_passed(); };
  waiters_.push_back(std::this_thread::get_id());
  while (!is_done() && !is_late()) {
    if (attendant_ == Attendant::kNone && !is_ending_) {
      attendant_ = Attendant::kForeground;
      lock.unlock();
      try {
        attend(is_done, deadline, check_interrupt);
      } catch (...) {
        leave();
        stop_waiting(lock);
        throw;
      }
      leave();
      lock.lock();
      continue;
    }
    if (attendant_ == Attendant::kBackground) {
      channel_->wake();  // it may only be spinning
    }
    changed_.wait_for(lock, kLookAround);
    if (check_interrupt != nullptr && !is_done()) {
      lock.unlock();
      try {
        (*check_interrupt)();
      } catch (...) {
        stop_waiting(lock);
        throw;
      }
      lock.lock();
    }
  }
  const bool result = is_done();
  stop_waiting(lock);
  return result;
}

void NamedEngine::stop_waiting(std::unique_lock<std::mutex>& lock) {
  if (!lock.owns_lock()) {
    lock.lock();
  }
  std::erase(waiters_, std::this_thread::get_id());
  lock.unlock();
  hand_on();
}

// On the thread that is the attendant, in the foreground.
void NamedEngine::attend(FunctionRef<bool()> is_done, const Deadline* deadline,
                         InterruptCheck check_interrupt) {
  channel_->attend();
  while (true) {
    const std::uint32_t seen = channel_->events();
    const bool did_something = attend_once(check_interrupt);
    {
      const std::lock_guard lock(mutex_);
      if (is_done() || is_ending_) {
        return;
      }
    }
    if (did_something || channel_->spin(seen)) {
      continue;
    }
    if (deadline != nullptr && deadline->has_passed()) {
      return;
    }
    channel_->sleep(Sleeper::kForeground, seen, kLookAround);
    look_around();
    if (check_interrupt != nullptr) {
      (*check_interrupt)();
    }
  }
}

// The attendant in the foreground goes. What came until now has been looked at, so that the
// background thread need not wake up just for having missed it.
void NamedEngine::leave() {
  bool has_own = false;
  {
    const std::lock_guard lock(mutex_);
    has_own = n_unpromised_ > 0;
  }
  std::uint32_t seen = channel_->events();
  channel_->leave_to_background(!has_own);
  do {
    seen = channel_->events();
    exchange();
    publish_finished();
  } while (channel_->events() != seen);
  const std::lock_guard lock(mutex_);
  attendant_ = Attendant::kNone;
}

// After leaving: somebody has to go on with what is left.
void NamedEngine::hand_on() {
  const std::lock_guard lock(mutex_);
  if (attendant_ != Attendant::kNone) {
    return;
  }
  if (!waiters_.empty()) {
    changed_.notify_all();
  } else if (has_work() || !queue_.empty() || stop_thread_ ||
             (sleeps_until_called_ && (!in_flight_.empty() || has_device_work_))) {
    call_background();
  }
}

void NamedEngine::background_loop() {
  name_this_thread("horon-named");
  std::unique_lock lock(mutex_);
  while (!stop_thread_) {
    std::uint32_t seen = channel_->events();
    std::chrono::nanoseconds limit = kForever;
    is_background_called_ = false;
    if (attendant_ == Attendant::kNone && waiters_.empty()) {
      attendant_ = Attendant::kBackground;
      lock.unlock();
      seen = attend_in_background();
      lock.lock();
      attendant_ = Attendant::kNone;
      if (!waiters_.empty()) {
        changed_.notify_all();
        continue;  // to sleep until they are done
      }
      if (!queue_.empty()) {
        limit = gather_time();
        if (limit.count() <= 0) {
          continue;
        }
      } else if (!in_flight_.empty() || has_device_work_ ||
                 (agreement_ && agreement_->is_waiting())) {
        limit = kLookAround;
      }
    }
    if (stop_thread_) {
      break;
    }
    sleeps_until_called_ = limit == kForever;
    lock.unlock();
    channel_->sleep(Sleeper::kBackground, seen, limit);
    lock.lock();
    sleeps_until_called_ = false;
  }
}

// Returns what events() was when there was nothing more to do.
std::uint32_t NamedEngine::attend_in_background() {
  channel_->attend();
  while (true) {
    const std::uint32_t seen = channel_->events();
    if (attend_once(nullptr, true)) {
      continue;
    }
    if (Clock::now() - last_look_ >= kLookAround) {
      look_around();
    }
    bool is_wanted = false;
    bool has_own = false;
    bool is_gathering = false;
    {
      const std::lock_guard lock(mutex_);
      is_wanted = !waiters_.empty() || stop_thread_;
      has_own = n_unpromised_ > 0;
      is_gathering = !queue_.empty();
    }
    if (!is_wanted && !is_gathering && channel_->spin(seen)) {
      continue;
    }
    channel_->leave_to_background(!has_own);
    if (is_wanted || channel_->events() == seen) {
      return seen;
    }
    channel_->attend();
  }
}

}  // namespace horon
