#include "shm/window_signals.h"

#include <algorithm>

#include "shm/word_wait.h"

namespace horon {

void raise_signal(SignalWords& words) {
  // Release: what was put is visible to who sees the count. The count comes before the futex word:
  // a target that sees the word's change finds the signal.
  words.raised.fetch_add(1, std::memory_order_release);
  words.value.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(words);
}

bool IncomingSignals::take_now() {
  if (!has_more()) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  hand_out();
  if (!expected_.empty() || !has_more()) {
    return false;
  }
  taken_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

std::shared_ptr<ExpectedSignal> IncomingSignals::expect() {
  auto signal = std::make_shared<ExpectedSignal>();
  const std::lock_guard lock(mutex_);
  expected_.push_back(signal);
  hand_out();
  return signal;
}

void IncomingSignals::hand_out() {
  while (!expected_.empty() && has_more()) {
    taken_.fetch_add(1, std::memory_order_relaxed);
    // Release: who sees it sees what was put before the signal, as this thread does.
    expected_.front()->has_arrived_.store(true, std::memory_order_release);
    expected_.pop_front();
  }
}

bool IncomingSignals::look_for(const ExpectedSignal& signal) {
  if (!signal.has_arrived() && has_more()) {
    const std::lock_guard lock(mutex_);
    hand_out();
  }
  return signal.has_arrived();
}

bool IncomingSignals::remove(const ExpectedSignal& signal) {
  hand_out();
  if (signal.has_arrived()) {
    return false;
  }
  std::erase_if(expected_, [&](const auto& other) { return other.get() == &signal; });
  return true;
}

bool IncomingSignals::forget(const ExpectedSignal& signal) {
  const std::lock_guard lock(mutex_);
  return remove(signal);
}

void IncomingSignals::give_back(const ExpectedSignal& signal) {
  const std::lock_guard lock(mutex_);
  if (!remove(signal)) {  // signals do not differ
    taken_.fetch_sub(1, std::memory_order_relaxed);
    hand_out();
  }
}

void IncomingSignals::await(const ExpectedSignal& signal, FunctionRef<void()> check,
                            const WaitContext& context) {
  std::unique_lock lock(policy_mutex_, std::try_to_lock);
  WaitPolicy other(peers_->is_crowded);  // for a second thread that waits for the same source
  const auto never = [] { return false; };
  wait_for_word(
      *words_, lock.owns_lock() ? policy_ : other, [&] { return look_for(signal); }, never,
      [&] { check(); }, context, AssumeCoreNeeded{}, peers_->linger_time);
}

}  // namespace horon
