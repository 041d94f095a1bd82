// P2pEngine: who moves messages, and when they sleep. See Note [Who moves messages].

#include <algorithm>
#include <system_error>

#include "core/error.h"
#include "core/futex.h"
#include "core/linger_budget.h"
#include "core/log.h"
#include "core/nesting.h"
#include "core/thread_name.h"
#include "p2p/p2p_engine.h"
#include "shm/rank_cores.h"
#include "shm/word_wait.h"

namespace horon {
namespace {

// How long the background thread stays awake after the last operation.
constexpr std::chrono::milliseconds kLinger{200};
// How long it leaves a new operation to its caller, who most likely comes to wait for it.
constexpr std::chrono::milliseconds kGrace{1};

// A waiting caller looks at so many rings besides the doorbell.
constexpr std::size_t kMostRingsToLookAt = 8;

// Rounds of a waiting caller, each of which moves something or waits for less than a sleep, between
// two looks at the clock.
constexpr std::uint32_t kRoundsPerLook = 16;

void sleep_while(RankWords& words, std::uint32_t seen, std::chrono::milliseconds limit) {
  if (words.doorbell.load(std::memory_order_seq_cst) == seen) {
    futex_wait(words.doorbell, seen, limit);
  }
}

void ring(RankWords& words) {
  // seq_cst on both: either the sleeper's re-check sees the new value, or we see that it sleeps.
  words.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (words.doorbell_waiters.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(words.doorbell);
  }
}

// A helper that is in a callback moves nothing, for as long as the callback takes.
class InCallback {
 public:
  explicit InCallback(std::atomic<int>* helpers) : helpers_(helpers) {
    if (helpers_ != nullptr) {
      helpers_->fetch_sub(1, std::memory_order_relaxed);
    }
  }
  ~InCallback() {
    if (helpers_ != nullptr) {
      helpers_->fetch_add(1, std::memory_order_relaxed);
    }
  }
  InCallback(const InCallback&) = delete;
  InCallback& operator=(const InCallback&) = delete;

 private:
  std::atomic<int>* const helpers_;  // null: was none
};

}  // namespace

bool P2pEngine::is_busy() const {
  if (!sends_.empty() || !receives_.empty() || !streams_.empty()) {
    return true;
  }
  return std::any_of(outgoing_.begin(), outgoing_.end(),
                     [](const Outgoing& out) { return !out.control.empty(); }) ||
         (sockets_ && !sockets_->is_flushed());
}

bool P2pEngine::is_core_needed() {
  const std::uint32_t own = tell_core(*segment_, peers_->rank);
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < static_cast<int>(local_.size()); ++peer) {
    const int local = local_[static_cast<std::size_t>(peer)];
    if (local >= 0 && peer != rank_ && told_core_plus_one(*segment_, local) == own &&
        is_awaited(peer)) {
      return true;
    }
  }
  return false;
}

bool P2pEngine::is_awaited(int peer) const {
  return std::any_of(sends_.begin(), sends_.end(),
                     [&](const auto& send) { return send.second->peer == peer; }) ||
         std::any_of(receives_.begin(), receives_.end(),
                     [&](const Op& op) { return op->peer == peer || op->peer == kAnySource; }) ||
         std::any_of(streams_.begin(), streams_.end(),
                     [&](const auto& stream) { return stream.first.first == peer; });
}

bool P2pEngine::has_incoming() const {
  return std::any_of(incoming_.begin(), incoming_.end(),
                     [](const auto& ring) { return ring && ring->has_frame(); });
}

void P2pEngine::ring_doorbell(int peer) {
  const int local = local_[static_cast<std::size_t>(peer)];
  if (local >= 0) {  // others hear of it from their sockets
    ring(segment_->words(local));
  }
}

void P2pEngine::ring_own_doorbell() { ring(segment_->words(peers_->rank)); }

std::chrono::milliseconds P2pEngine::arm_sockets(std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kUnwatched{1};
  return sockets_ == nullptr || sockets_->arm() ? limit : std::min(limit, kUnwatched);
}

void P2pEngine::count_background(bool is_counted) {
  if (is_counted != background_counts_) {
    background_counts_ = is_counted;
    auto& waiters = segment_->words(peers_->rank).doorbell_waiters;
    is_counted ? waiters.fetch_add(1, std::memory_order_seq_cst)
               : waiters.fetch_sub(1, std::memory_order_relaxed);
  }
}

void P2pEngine::tell_background() {
  ++calls_;
  if (!background_.joinable()) {
    try {
      background_ = std::thread([self = shared_from_this()] { self->background_loop(); });
    } catch (const std::system_error& error) {
      // What was issued is under way: whoever waits moves the messages.
      log_warning_once("p2p without a thread",
                       concat("rank ", rank_, ": the system gives no thread (", error.what(),
                              "); messages move only while somebody waits for one"));
    }
  } else if (!background_watches_) {
    became_busy_.notify_one();  // or it is at work, and will see
  }
}

bool P2pEngine::replace_background() {
  join_ended();
  replaced_.push_back(std::move(background_));
  tell_background();
  if (!background_.joinable()) {
    background_ = std::move(replaced_.back());
    replaced_.pop_back();
    return false;
  }
  return true;
}

void P2pEngine::join_ended() {
  for (const std::thread::id id : have_ended_) {
    const auto ended =
        std::find_if(replaced_.begin(), replaced_.end(),
                     [&](const std::thread& thread) { return thread.get_id() == id; });
    if (ended != replaced_.end()) {
      ended->join();  // it has given the lock back for good
      replaced_.erase(ended);
    }
  }
  have_ended_.clear();
}

bool P2pEngine::watch() {
  std::unique_lock lock(mutex_);
  if (on_background_thread() && has_work() && !stop_thread_) {
    return replace_background();
  }
  if (has_work() && !background_.joinable()) {
    tell_background();
  }
  if (background_watches_ && has_work() && helpers_.load(std::memory_order_relaxed) == 0) {
    count_background(true);
    (void)arm_sockets(kLookAround);
    // seq_cst, after the count and before the rings: a peer that did not see the count has rung
    // before this load, which then sees what it sent. The ring's own acquire alone does not say so.
    (void)segment_->words(peers_->rank).doorbell.load(std::memory_order_seq_cst);
    pump();  // what came before it was counted woke nobody
    deliver(lock);
  } else if (!background_watches_ && has_callbacks()) {
    became_busy_.notify_one();  // whoever carries out a callback may wait for what comes after it
  }
  if (!left_.empty()) {
    ring_own_doorbell();  // this callback may wait for what it has left
  }
  return background_.joinable() || !has_work();
}

// One at a time, since a callback may wait for another operation that has finished, too.
void P2pEngine::deliver(std::unique_lock<std::mutex>& lock, Caller caller) {
  const bool leaves_callbacks = Nesting::is_deep(this);
  while (leaves_callbacks ? !finished_.empty() : has_callbacks()) {
    const bool was_left = !leaves_callbacks && !left_.empty();
    std::deque<Op>& queue = was_left ? left_ : finished_;
    Op op = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    if (!was_left) {
      op->complete(op->error, op->source);
    }
    if (!leaves_callbacks) {
      const InCallback helps_nobody(caller == Caller::kHelper ? &helpers_ : nullptr);
      const Nesting nesting(this);
      op->call_back();
      op.reset();  // destructors may call out, too
    }
    if (helpers_.load(std::memory_order_relaxed) > (caller == Caller::kHelper ? 1 : 0)) {
      ring_own_doorbell();  // it may be what another one waits for
    }
    lock.lock();
    if (op) {
      left_.push_back(std::move(op));
    }
  }
}

void P2pEngine::poll() {
  std::unique_lock lock(mutex_);
  pump();
  stand_in();
  deliver(lock);
}

void P2pEngine::stand_in() {
  if (background_.joinable() || !is_busy()) {
    return;
  }
  const Clock::time_point now = Clock::now();
  if (next_look_ == Clock::time_point{}) {
    next_look_ = now + kLookAround;
  } else if (now >= next_look_) {
    look_around();
    next_look_ = Clock::now() + kLookAround;
  }
}

void P2pEngine::help_until(FunctionRef<bool()> is_done,
                           const std::function<void()>* check_interrupt, const void* waiter) {
  std::unique_lock lock(mutex_);
  helpers_.fetch_add(1, std::memory_order_relaxed);
  count_background(false);
  std::exception_ptr interrupt;
  try {
    help(is_done, check_interrupt, waiter, lock);
  } catch (...) {
    interrupt = std::current_exception();
    if (!lock.owns_lock()) {
      lock.lock();
    }
  }
  if (helpers_.fetch_sub(1, std::memory_order_relaxed) == 1 && is_busy()) {
    tell_background();
  }
  deliver(lock);
  if (interrupt) {
    std::rethrow_exception(interrupt);
  }
}

void P2pEngine::help(FunctionRef<bool()> is_done, const std::function<void()>* check_interrupt,
                     const void* waiter, std::unique_lock<std::mutex>& lock) {
  static thread_local WaitPolicy with_a_core(false);
  static thread_local WaitPolicy in_crowd(true);
  WaitPolicy& policy = peers_->is_crowded ? in_crowd : with_a_core;
  RankWords& own = segment_->words(peers_->rank);
  // A message is seen before the doorbell, which is rung after it and whose line travels as well.
  const bool looks_at_rings = local_.size() <= kMostRingsToLookAt;
  Clock::time_point next_check{};
  LingerBudget lingering;
  LongWait long_wait;
  Op awaited;  // once this has slept
  for (std::uint32_t round = 0;; ++round) {
    bool has_slept = false;
    const std::uint32_t seen = own.doorbell.load(std::memory_order_seq_cst);
    const bool moved = pump();
    deliver(lock, Caller::kHelper);
    lock.unlock();
    if (is_done()) {
      lock.lock();
      if (awaited && !awaited->error) {
        long_wait.go_on();
      }
      return;
    }
    const auto rung = [&] {
      return (looks_at_rings && has_incoming()) ||
             own.doorbell.load(std::memory_order_acquire) != seen ||
             (sockets_ && sockets_->has_something());
    };
    if (peers_->is_crowded) {
      tell_core(*segment_, peers_->rank);
    }
    if (moved) {
      lingering.renew();
    } else if (!policy.spin(rung, [this] { return is_core_needed(); }) &&
               !lingering.spend([&](std::chrono::nanoseconds most) {
                 return policy.linger(rung, peers_->linger_time, most);
               })) {
      own.doorbell_waiters.fetch_add(1, std::memory_order_seq_cst);
      sleep_while(own, seen, arm_sockets(kLookAround));
      own.doorbell_waiters.fetch_sub(1, std::memory_order_relaxed);
      has_slept = true;
    }
    // Not after each small message: it costs two looks at the clock.
    if (check_interrupt != nullptr && (has_slept || round % kRoundsPerLook == 1)) {
      const Clock::time_point now = Clock::now();
      if (next_check == Clock::time_point{}) {
        next_check = now + kLookAround;
      } else if (now >= next_check) {
        (*check_interrupt)();
        next_check = Clock::now() + kLookAround;
      }
    }
    lock.lock();
    if (has_slept || round % kRoundsPerLook == 1) {
      stand_in();
    }
    if (has_slept && waiter != nullptr) {
      awaited = awaited ? awaited : find_awaited(waiter);
      if (awaited) {
        look_at_wait(long_wait, *awaited);
      }
    }
  }
}

void P2pEngine::background_loop() {
  name_this_thread("horon-p2p");
  WaitPolicy policy(peers_->is_crowded);
  RankWords& own = segment_->words(peers_->rank);
  Clock::time_point last_busy = Clock::now();
  std::uint64_t calls_seen = 0;
  const auto is_alone = [&] { return helpers_.load(std::memory_order_relaxed) == 0; };
  std::unique_lock lock(mutex_);
  next_look_ = Clock::now() + kLookAround;
  while (!stop_thread_ && on_background_thread()) {
    const Clock::time_point now = Clock::now();
    if (is_busy()) {
      last_busy = now;
    } else if (now - last_busy >= kLinger) {
      became_busy_.wait(lock, [&] { return stop_thread_ || has_work(); });
      last_busy = Clock::now();
    }
    if (now >= next_look_) {
      look_around();
      next_look_ = Clock::now() + kLookAround;
    }
    const std::uint32_t seen = own.doorbell.load(std::memory_order_seq_cst);
    // Not while callers come and go: they move their messages themselves.
    const bool is_mine = is_alone() && calls_ == calls_seen;
    calls_seen = calls_;
    const bool moved = is_mine && pump();
    const bool delivers = has_callbacks();
    deliver(lock);
    if (moved || delivers || stop_thread_) {
      continue;  // in deliver() another thread may have taken this one's place
    }
    const bool is_watching = is_mine && is_busy();
    if (is_watching) {
      const auto rung = [&] {
        return own.doorbell.load(std::memory_order_acquire) != seen ||
               (sockets_ && sockets_->has_something());
      };
      lock.unlock();
      const bool is_rung =
          policy.spin([&] { return rung() || !is_alone(); }, [this] { return is_core_needed(); });
      lock.lock();
      if (is_rung || stop_thread_) {
        continue;
      }
    }
    background_watches_ = true;
    count_background(is_watching && is_alone());
    const auto limit = is_watching ? arm_sockets(kLookAround) : is_alone() ? kGrace : kLookAround;
    lock.unlock();
    sleep_while(own, seen, limit);
    lock.lock();
    background_watches_ = false;
    count_background(false);
  }
  if (!stop_thread_) {
    have_ended_.push_back(std::this_thread::get_id());
  }
}

}  // namespace horon
