#include "shm/step_board.h"

#include <algorithm>

#include "core/error.h"
#include "core/rank_list.h"
#include "shm/futex.h"

namespace horon {
namespace {

// How long to sleep before looking whether the peer is still alive and somebody wants us back.
constexpr std::chrono::milliseconds kLookAround{50};

}  // namespace

StepBoard::StepBoard(Segment* segment, const Peers* peers) : segment_(segment), peers_(peers) {}

void StepBoard::finish_step() {
  ++step_;
  RankWords& own = segment_->words(peers_->rank);
  // seq_cst on both: either the sleeper's re-check sees this step, or we see that it sleeps.
  own.step.store(step_, std::memory_order_seq_cst);
  if (own.step_waiters.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(own.step);
  }
}

bool StepBoard::has_arrived(int peer) const {
  // Acquire: what the peer wrote before its step is visible. Signed difference: the counter wraps.
  const std::uint32_t reached = segment_->words(peer).step.load(std::memory_order_acquire);
  return static_cast<std::int32_t>(reached - step_) >= 0;
}

void StepBoard::await_all(const WaitContext& context) {
  for (int offset = 1; offset < peers_->n_ranks(); ++offset) {
    const int peer = (peers_->rank + offset) % peers_->n_ranks();
    if (!has_arrived(peer)) {
      await(peer, context);
    }
  }
}

void StepBoard::await(int peer, const WaitContext& context) {
  RankWords& watched = segment_->words(peer);
  const auto ready = [&] { return has_arrived(peer) || aborted_.load(std::memory_order_relaxed); };
  policy_.spin(ready);
  Clock::time_point next_interrupt_check = Clock::now() + kLookAround;
  while (!has_arrived(peer)) {
    check_health(peer, context);
    watched.step_waiters.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = watched.step.load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(seen - step_) < 0) {
      const auto limit = std::min<std::chrono::nanoseconds>(
          kLookAround, std::max<std::chrono::nanoseconds>(context.deadline.remaining(),
                                                          std::chrono::microseconds(1)));
      futex_wait(watched.step, seen, limit);
    }
    watched.step_waiters.fetch_sub(1, std::memory_order_relaxed);
    if (context.check_interrupt != nullptr && Clock::now() >= next_interrupt_check) {
      (*context.check_interrupt)();
      next_interrupt_check = Clock::now() + kLookAround;
    }
  }
}

void StepBoard::check_health(int peer, const WaitContext& context) const {
  if (aborted_.load(std::memory_order_acquire)) {
    throw GroupError(abort_reason_);
  }
  if (segment_->is_poisoned()) {
    throw GroupError(segment_->poison_text());
  }
  // All of the missing, not only the one waited for: a death is news even while another is late.
  for (const int missing : missing_ranks()) {
    const bool departed = segment_->words(missing).departed.load(std::memory_order_acquire) != 0;
    const bool ended =
        !departed && has_ended(peers_->peers[static_cast<std::size_t>(missing)].liveness_fd.get());
    if ((departed || ended) && !has_arrived(missing)) {
      throw PeerLostError(
          concat(peers_->describe(missing), departed ? " left the group (destroyed it or exited)"
                                                     : " died (killed or crashed)"));
    }
  }
  if (context.deadline.has_passed() && !has_arrived(peer)) {
    throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(), "ms for ",
                              name_ranks(missing_ranks())));
  }
}

std::vector<int> StepBoard::missing_ranks() const {
  std::vector<int> missing;
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    if (peer != peers_->rank && !has_arrived(peer)) {
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
