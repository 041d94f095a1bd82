#include "shm/step_board.h"

#include "core/cpu_budget.h"
#include "core/error.h"
#include "core/rank_list.h"
#include "core/running_operation.h"
#include "shm/late_rank.h"
#include "shm/rank_cores.h"
#include "shm/word_wait.h"
#include "watch/stall_schedule.h"

namespace horon {
namespace {

constexpr std::uint32_t kWaitsPerLook = 4;  // one look reads a word of every rank

// What an operation's description calls this rank.
int operation_rank(const OperationName* operation) {
  return operation == nullptr ? -1 : operation->rank;
}

}  // namespace

StepBoard::StepBoard(Segment* segment, const Peers* peers)
    : segment_(segment),
      peers_(peers),
      policy_(peers->is_crowded),
      allowed_(allowed_cpus()),
      cores_(static_cast<std::size_t>(peers->n_ranks()), -1) {}

void StepBoard::advance(Counter counter) {
  tell_core(*segment_, peers_->rank);  // so that it is news to whoever waited for this
  const std::uint32_t reached = ++own_[static_cast<int>(counter)];
  CounterWord& own = word(peers_->rank, counter);
  // seq_cst on both: either the sleeper's re-check sees this value, or we see that it sleeps.
  own.value.store(reached, std::memory_order_seq_cst);
  wake_sleepers(own);
}

bool StepBoard::has_reached(int peer, Counter counter, std::uint32_t target) const {
  // Acquire: what the peer wrote before it got there is visible. Signed: the counters wrap.
  const std::uint32_t reached = word(peer, counter).value.load(std::memory_order_acquire);
  return static_cast<std::int32_t>(reached - target) >= 0;
}

bool StepBoard::have_all_reached(Counter counter, std::uint32_t target) const {
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    if (peer != peers_->rank && !has_reached(peer, counter, target)) {
      return false;
    }
  }
  return true;
}

bool StepBoard::await_briefly(Counter counter, std::uint32_t target) {
  if (policy_.spin([&] { return have_all_reached(counter, target); },
                   [&] { return is_core_needed(counter, target); })) {
    return true;
  }
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    if (peer != peers_->rank && !has_reached(peer, counter, target)) {
      sleep_on(
          word(peer, counter), [&] { return has_reached(peer, counter, target); },
          std::chrono::milliseconds(1));
      break;
    }
  }
  return have_all_reached(counter, target);
}

bool StepBoard::spin_for(Clock::duration time, Counter counter, std::uint32_t target) const {
  return horon::spin_for(time, [&] { return have_all_reached(counter, target); });
}

bool StepBoard::would_fail(Counter counter, std::uint32_t target) {
  const Clock::time_point now = Clock::now();
  if (now < next_look_) {
    return false;
  }
  next_look_ = now + kLookAround;
  awaited_ = counter;
  target_ = target;
  try {
    check_health();
  } catch (const GroupError&) {
    return !missing_ranks().empty();
  }
  return false;
}

void StepBoard::await_all(Counter counter, std::uint32_t target, const WaitContext& context) {
  awaited_ = counter;
  target_ = target;
  if (++waits_ % kWaitsPerLook == 0 && peers_->may_move) {
    look_for_better_core();
  }
  LongWait wait;
  for (int offset = 1; offset < peers_->n_ranks(); ++offset) {
    const int peer = (peers_->rank + offset) % peers_->n_ranks();
    if (!has_reached(peer)) {
      await(peer, context, wait);
    }
  }
  wait.go_on();
}

// Whether a rank that is late was last seen on this core.
bool StepBoard::is_core_needed(Counter counter, std::uint32_t target) const {
  const std::uint32_t own = tell_core(*segment_, peers_->rank);
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    if (peer != peers_->rank && told_core_plus_one(*segment_, peer) == own &&
        !has_reached(peer, counter, target)) {
      return true;
    }
  }
  return false;
}

void StepBoard::look_for_better_core() {
  tell_core(*segment_, peers_->rank);
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    cores_[static_cast<std::size_t>(peer)] =
        static_cast<int>(told_core_plus_one(*segment_, peer)) - 1;
  }
  if (const auto core = spread_.look(cores_, peers_->rank, allowed_)) {
    if (!move_to_core(*core)) {
      allowed_ = allowed_cpus();  // which may have changed, or be another thread's
    }
    tell_core(*segment_, peers_->rank);
  }
}

void StepBoard::await(int peer, const WaitContext& context, LongWait& wait) {
  const auto ready = [&] { return has_reached(peer); };
  const auto check = [&] {
    check_health();
    if (context.deadline.has_passed() && !has_reached(peer)) {
      const std::vector<int> missing = missing_ranks();
      throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(), "ms for ",
                                peers_->name(missing)),
                         peers_->numbers_of(missing));
    }
    wait.look(context.deadline, [&](bool) { return what_is_awaited(context); });
  };
  sleep_until(word(peer, awaited_), ready, check, context,
              [this] { return is_core_needed(awaited_, target_); });
}

Waiting StepBoard::what_is_awaited(const WaitContext& context) const {
  const std::vector<int> missing = missing_ranks();
  Waiting waiting;
  const OperationName* operation = RunningOperation::of_this_thread();
  waiting.operation = RunningOperation::description();
  const auto own = static_cast<std::size_t>(peers_->rank);
  if (own < peers_->global_ranks.size() && peers_->global_ranks[own] != operation_rank(operation)) {
    waiting.operation += concat(" [global rank ", peers_->global_ranks[own], "]");
  }
  waiting.is_blocking = context.may_linger;
  waiting.reports = is_first_to_come(peers_->rank, missing);
  for (const int rank : missing) {
    waiting.late.push_back(late_rank(*segment_, *peers_, rank));
  }
  return waiting;
}

void StepBoard::await_value(CounterWord& word, std::uint32_t value, const WaitContext& context) {
  // Acquire: what the ranks wrote before they moved the word on is visible.
  const auto ready = [&] { return word.value.load(std::memory_order_acquire) == value; };
  const auto check = [&] {
    check_ended();
    for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
      // Whether it is this one that others wait for is not known; it might be.
      if (has_ended(peers_->peers[static_cast<std::size_t>(peer)].liveness_fd.get()) && !ready()) {
        throw PeerLostError(concat(peers_->describe(peer), " died (killed or crashed)"));
      }
    }
    if (context.deadline.has_passed() && !ready()) {
      throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(),
                                "ms for a part of the work that another rank had taken"));
    }
  };
  sleep_until(word, ready, check, context, AssumeCoreNeeded{});
}

void StepBoard::wake(CounterWord& word) {
  // As in advance(): a sleeper counts itself before it looks again.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_sleepers(word);
}

template <typename Ready, typename Check, typename IsCoreNeeded>
void StepBoard::sleep_until(CounterWord& word, const Ready& ready, const Check& check,
                            const WaitContext& context, const IsCoreNeeded& is_core_needed) {
  const auto is_aborted = [this] { return aborted_.load(std::memory_order_relaxed); };
  wait_for_word(word, policy_, ready, is_aborted, check, context, is_core_needed,
                peers_->linger_time);
}

void StepBoard::check_ended() const {
  if (aborted_.load(std::memory_order_acquire)) {
    throw GroupError(abort_reason_);
  }
  if (segment_->is_poisoned()) {
    throw GroupError(segment_->poison_text());
  }
}

void StepBoard::check_health() const {
  check_ended();
  // All of the missing, not only the one waited for: a death is news even while another is late.
  for (const int missing : missing_ranks()) {
    const bool departed = segment_->words(missing).departed.load(std::memory_order_acquire) != 0;
    const bool ended =
        !departed && has_ended(peers_->peers[static_cast<std::size_t>(missing)].liveness_fd.get());
    if ((departed || ended) && !has_reached(missing)) {
      throw PeerLostError(
          concat(peers_->describe(missing), departed ? " left the group (destroyed it or exited)"
                                                     : " died (killed or crashed)"));
    }
  }
}

std::vector<int> StepBoard::missing_ranks() const {
  std::vector<int> missing;
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    if (peer != peers_->rank && !has_reached(peer)) {
      missing.push_back(peer);
    }
  }
  return missing;
}

void StepBoard::abort(const std::string& reason) {
  if (!aborting_.exchange(true, std::memory_order_relaxed)) {
    abort_reason_ = reason;
    // Release: pairs with the acquire in check_health, for the reason.
    aborted_.store(true, std::memory_order_release);
  }
  segment_->wake_all();
}

}  // namespace horon
