// NamedEngine: who attends, and when threads sleep. See Note [Attending].

#include <algorithm>

#include "core/error.h"
#include "core/linger_budget.h"
#include "core/thread_name.h"
#include "named/named_engine.h"

namespace horon {

using Sleeper = ControlChannel::Sleeper;

namespace {

// The background thread with nothing to wait for.
constexpr std::chrono::hours kForever{24};
// Of somebody who waits and does not sleep, between two looks at the clock.
constexpr std::uint32_t kRoundsPerLook = 16;

std::chrono::nanoseconds at_most(std::chrono::nanoseconds time, const Deadline* deadline) {
  return deadline == nullptr ? time : std::min(time, deadline->remaining());
}

}  // namespace

bool NamedEngine::attend_until(FunctionRef<bool()> is_done, const Deadline* deadline,
                               InterruptCheck check_interrupt, Manner manner, const Look* look) {
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
        attend(is_done, deadline, check_interrupt, manner, look);
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
    changed_.wait_for(lock, at_most(kLookAround, deadline));
    if (look != nullptr) {
      (*look)();
    }
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
                         InterruptCheck check_interrupt, Manner manner, const Look* look) {
  channel_->attend();
  free_since_ = Clock::now();
  is_meeting_ = manner == Manner::kBriefly;
  LingerBudget lingering;
  std::uint32_t rounds = 0;
  while (true) {
    const std::uint32_t seen = channel_->events();
    bool did_something = attend_once(check_interrupt);
    if (!did_something && manner == Manner::kPatiently && end_left(check_interrupt)) {
      note_wait();
      did_something = true;
    }
    if (did_something) {
      lingering.renew();
    }
    {
      const std::lock_guard lock(mutex_);
      // What is agreed on besides would need the background thread, which would have to wake up.
      const bool has_more = manner == Manner::kBriefly && !steps_.empty();
      if ((is_done() && !has_more) || is_ending_) {
        return;
      }
    }
    if (did_something ||
        (manner == Manner::kBriefly ? channel_->pause(seen) : channel_->spin(seen))) {
      // Traffic of others that never stops must not keep this rank from looking around.
      if (manner == Manner::kBriefly || ++rounds % kRoundsPerLook != 0 ||
          Clock::now() - last_look_ < kLookAround) {
        continue;
      }
    } else {
      if (deadline != nullptr && deadline->has_passed()) {
        return;
      }
      if (manner == Manner::kBriefly) {
        continue;
      }
      const std::chrono::nanoseconds limit = at_most(kLookAround, deadline);
      if (lingering.spend([&](std::chrono::nanoseconds most) {
            return channel_->linger(seen, std::min(limit, most));
          })) {
        continue;
      }
      channel_->sleep(Sleeper::kForeground, seen, limit);
    }
    look_around();
    if (look != nullptr) {
      (*look)();
    }
    if (check_interrupt != nullptr) {
      (*check_interrupt)();
    }
  }
}

void NamedEngine::meet(std::uint64_t handle, InterruptCheck check_interrupt) {
  std::uint32_t meeting = 0;
  const Operation operation = begin_meeting(handle, &meeting);
  if (!operation) {
    return;
  }
  bool is_given_up = false;
  const auto is_over = [&] {  // with the mutex
    is_given_up = rank_ != 0 && queue_.empty() && channel_->given_up_meeting() >= meeting;
    return operation->is_done || operation->is_left || is_given_up;
  };
  const Deadline deadline = Deadline::after(options_.meeting_patience);
  attend_until(is_over, &deadline, check_interrupt, Manner::kBriefly);
  const std::lock_guard lock(mutex_);
  const bool has_met = operation->is_done || operation->is_left;
  if (has_met || !is_given_up) {
    meeting_trust_.record(has_met);
  }
  if (!has_met && rank_ == 0) {
    channel_->give_up_meeting(meeting);
  }
}

void NamedEngine::begin_counting_meetings() {
  const std::lock_guard lock(mutex_);
  n_meetings_ = 0;
  if (rank_ == 0) {
    channel_->give_up_meeting(0);
  }
}

// The operation to meet for; null if it is not large, or this is no time for that.
NamedEngine::Operation NamedEngine::begin_meeting(std::uint64_t handle, std::uint32_t* meeting) {
  const std::lock_guard lock(mutex_);
  const auto found = may_meet_ ? operations_.find(handle) : operations_.end();
  if (found == operations_.end()) {
    return nullptr;
  }
  const Operation& operation = found->second;
  std::uint64_t bytes = 0;
  for (const NamedOperation::Tensor& tensor : operation->tensors) {
    bytes += tensor.input.bytes;
  }
  if (bytes < kMeetForBytes || operation->request->process_set != 0) {
    return nullptr;
  }
  *meeting = ++n_meetings_;  // before what differs from rank to rank
  if (operation->is_done || is_inside_wait()) {
    return nullptr;
  }
  if (!meeting_trust_.begin_wait(*meeting)) {
    if (rank_ == 0) {
      channel_->give_up_meeting(*meeting);
    }
    return nullptr;
  }
  return operation;
}

// What was left may have ended, although nobody has come by since.
void NamedEngine::look_at_left() {
  {
    const std::lock_guard lock(mutex_);
    if (!has_left_ || attendant_ != Attendant::kNone || is_ending_) {
      return;
    }
    attendant_ = Attendant::kForeground;
  }
  if (has_left_ended()) {
    end_left(nullptr);
  }
  leave();
  hand_on();
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
  is_meeting_ = false;
  while (true) {
    const std::uint32_t seen = channel_->events();
    if (attend_once(nullptr, true) || (has_left_ended() && end_left(nullptr))) {
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
