// Counters by which the ranks of a group on one host wait for each other.
//
// Note [Steps]
// Each rank owns a few counters that only grow; everybody else only reads them. Everything a
// collective does is a number of steps that follows from the headers, decided alike on all ranks,
// so the counters never drift apart. advance() publishes what this rank wrote; await_all() waits
// until everybody has come as far. A rank that is gone is only an error for whoever needs a step
// that it did not take.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/wait_context.h"
#include "shm/core_spread.h"
#include "shm/peers.h"
#include "shm/segment.h"
#include "shm/wait_policy.h"
#include "watch/long_wait.h"

namespace horon {

// Thread safety: advance and await_all belong to one thread at a time; abort may come from any.
// Ownership: views of a segment and of peers that outlive it.
class StepBoard {
 public:
  StepBoard(Segment* segment, const Peers* peers);

  // How far this rank is.
  std::uint32_t own(Counter counter) const { return own_[static_cast<int>(counter)]; }

  // Adds one to this rank's counter: publishes everything written so far and wakes who waits.
  void advance(Counter counter);

  // Whether every rank's counter has reached `target`. Does not wait.
  bool have_all_reached(Counter counter, std::uint32_t target) const;

  // Waits for at most about a millisecond; true when all have reached `target`.
  bool await_briefly(Counter counter, std::uint32_t target);

  // Waits for so long without giving the core away; true when all have reached `target`.
  bool spin_for(Clock::duration time, Counter counter, std::uint32_t target) const;

  // Whether a wait for `target` would throw, other than for its deadline. Looks now and then, as a
  // sleeping rank does, and says false in between.
  bool would_fail(Counter counter, std::uint32_t target);

  // Waits until every rank's counter has reached `target`.
  // Throws TimeoutError (naming the missing ranks), PeerLostError, GroupError after an abort or
  // when another rank ended the group, and whatever check_interrupt throws.
  void await_all(Counter counter, std::uint32_t target, const WaitContext& context);

  // Waits until a word that several ranks move on has a value; who moves it calls wake().
  // Throws as await_all, but can not name who is late.
  void await_value(CounterWord& word, std::uint32_t value, const WaitContext& context);
  void wake(CounterWord& word);

  // The usual step: advance, then wait for the others to do the same.
  void finish_step() { advance(Counter::kStep); }
  void await_all(const WaitContext& context) {
    await_all(Counter::kStep, own(Counter::kStep), context);
  }

  // Ranks that have not reached what was waited for last. For messages.
  std::vector<int> missing_ranks() const;

  // Makes waits in this process throw GroupError(reason).
  void abort(const std::string& reason);

 private:
  void await(int peer, const WaitContext& context, LongWait& wait);
  Waiting what_is_awaited(const WaitContext& context) const;
  bool is_core_needed(Counter counter, std::uint32_t target) const;
  void look_for_better_core();
  bool has_reached(int peer) const { return has_reached(peer, awaited_, target_); }
  bool has_reached(int peer, Counter counter, std::uint32_t target) const;
  template <typename Ready, typename Check, typename IsCoreNeeded>
  void sleep_until(CounterWord& word, const Ready& ready, const Check& check,
                   const WaitContext& context, const IsCoreNeeded& is_core_needed);
  void check_ended() const;
  void check_health() const;
  CounterWord& word(int rank, Counter counter) const {
    return segment_->words(rank).counter(counter);
  }

  Segment* const segment_;
  const Peers* const peers_;
  WaitPolicy policy_;
  CoreSpread spread_;
  std::vector<int> allowed_;  // where the thread that made the group may run
  std::vector<int> cores_;    // by rank, while looking
  std::uint32_t waits_ = 0;
  std::uint32_t own_[kCounters] = {};
  Counter awaited_ = Counter::kStep;  // what is waited for, or was last
  std::uint32_t target_ = 0;
  Clock::time_point next_look_{};      // of would_fail()
  std::atomic<bool> aborting_{false};  // whoever sets it writes the reason
  std::atomic<bool> aborted_{false};
  std::string abort_reason_;  // written before aborted_ is set, never after
};

}  // namespace horon
