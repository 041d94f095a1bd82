// Step counters: how ranks of a group on one host wait for each other.
//
// Note [Steps]
// Each rank owns a counter of the steps it has finished. Everything a collective does is a fixed
// number of steps, decided alike on all ranks from the headers, so the counters never drift apart.
// finish_step() publishes what this rank wrote; await_all() waits until everybody has finished as
// many. A rank that is gone is only an error for whoever needs a step that it did not finish.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/wait_context.h"
#include "shm/peers.h"
#include "shm/segment.h"
#include "shm/wait_policy.h"

namespace horon {

// Thread safety: finish_step and await_all belong to one thread at a time; abort may come from any.
// Ownership: views of a segment and of peers that outlive it.
class StepBoard {
 public:
  StepBoard(Segment* segment, const Peers* peers);

  // Publishes everything written so far and wakes who waits for it.
  void finish_step();

  // Waits until every rank has finished as many steps as this one.
  // Throws TimeoutError (naming the missing ranks), PeerLostError, GroupError after an abort or
  // when another rank ended the group, and whatever check_interrupt throws.
  void await_all(const WaitContext& context);

  // Ranks that have not finished as many steps as this one. For messages.
  std::vector<int> missing_ranks() const;

  // Makes waits in this process throw GroupError(reason).
  void abort(const std::string& reason);

 private:
  void await(int peer, const WaitContext& context);
  bool has_arrived(int peer) const;
  void check_health(int peer, const WaitContext& context) const;

  Segment* const segment_;
  const Peers* const peers_;
  WaitPolicy policy_;
  std::uint32_t step_ = 0;
  std::atomic<bool> aborting_{false};  // whoever sets it writes the reason
  std::atomic<bool> aborted_{false};
  std::string abort_reason_;  // written before aborted_ is set, never after
};

}  // namespace horon
