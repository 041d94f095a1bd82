// Signals from one rank of a window to another: counted in shared memory, taken one by one.
//
// Note [Signals]
// The source only counts up. The target hands the signals out in the order in which its callers
// asked for one: who comes second gets the second signal, and so knows of the first, too. A wait
// that fails leaves the queue, and its signal goes to the next.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "core/function_ref.h"
#include "core/wait_context.h"
#include "shm/peers.h"
#include "shm/wait_policy.h"
#include "shm/window_memory.h"

namespace horon {

// Publishes everything that this thread has stored, and wakes who waits. From any thread.
void raise_signal(SignalWords& words);

// A place in the queue for one source's signals.
class ExpectedSignal {
 public:
  bool has_arrived() const { return has_arrived_.load(std::memory_order_acquire); }

 private:
  friend class IncomingSignals;
  std::atomic<bool> has_arrived_{false};
};

// The target's side of one source's signals.
// Thread safety: all methods.
class IncomingSignals {
 public:
  // Ownership: views of words and peers that outlive it.
  IncomingSignals(SignalWords* words, const Peers* peers)
      : words_(words), peers_(peers), policy_(peers->is_crowded) {}

  // Takes the next signal, if it is there and nobody expects it.
  bool take_now();

  std::shared_ptr<ExpectedSignal> expect();
  // Whether this one has come. Does not wait.
  bool look_for(const ExpectedSignal& signal);
  // Leaves the queue; false when the signal has come in the meantime.
  bool forget(const ExpectedSignal& signal);
  // Leaves the queue, or leaves the signal to the next who wants one.
  void give_back(const ExpectedSignal& signal);

  // Waits; throws what `check` throws, which is called before each sleep, and what
  // context.check_interrupt throws. The signal stays expected then.
  void await(const ExpectedSignal& signal, FunctionRef<void()> check, const WaitContext& context);

 private:
  // Require mutex_:
  void hand_out();
  bool remove(const ExpectedSignal& signal);
  bool has_more() const {
    // Acquire: what the source stored before it raised the signal is visible.
    return words_->raised.load(std::memory_order_acquire) != taken_.load(std::memory_order_relaxed);
  }

  SignalWords* const words_;
  const Peers* const peers_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> taken_{0};                   // changed under mutex_
  std::deque<std::shared_ptr<ExpectedSignal>> expected_;  // guarded by mutex_
  std::mutex policy_mutex_;                               // for one waiting thread at a time
  WaitPolicy policy_;                                     // guarded by policy_mutex_
};

}  // namespace horon
