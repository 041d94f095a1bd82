// CudaGroup: what the watcher's thread does.

#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "core/log.h"
#include "core/rank_list.h"
#include "core/who_died.h"
#include "cuda/cuda_group.h"
#include "errors.h"
#include "group.h"
#include "process_exit.h"
#include "shm/liveness.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

// Every so many looks also the communicators and the other processes are looked at.
constexpr int kLooksPerCheckup = 5;
// What a rank has queued before it died may still complete. After that it will not.
constexpr std::chrono::seconds kGraceAfterDeath{2};
// How long the ranks that a timeout has struck wait for each other's reports.
constexpr std::chrono::seconds kReportPatience{3};

}  // namespace

bool CudaGroup::look() noexcept {
  try {
    const std::vector<Awaited> left = finish_ended(pending());
    if (!left.empty()) {
      look_at(left);
    }
  } catch (const std::exception& error) {
    stop(concat("work on the GPU failed: ", error.what()), false);
  }
  const std::lock_guard lock(mutex_);
  is_watched_ = launch_ || std::any_of(in_flight_.begin(), in_flight_.end(),
                                       [](const OperationPtr& one) { return !one->is_over(); });
  if (!is_watched_) {
    looks_ = 0;
    peer_died_at_.reset();
    idle_.notify_all();
  }
  return is_watched_;
}

std::vector<CudaGroup::OperationPtr> CudaGroup::pending() {
  const std::lock_guard lock(mutex_);
  std::vector<OperationPtr> found;
  std::copy_if(in_flight_.begin(), in_flight_.end(), std::back_inserter(found),
               [](const OperationPtr& operation) { return !operation->is_over(); });
  return found;
}

std::vector<CudaGroup::Awaited> CudaGroup::finish_ended(
    const std::vector<OperationPtr>& under_way) {
  std::vector<Awaited> left;
  for (const OperationPtr& operation : under_way) {
    if (!operation->has_ended()) {
      left.push_back({operation->name(), operation->sequence(), operation->deadline()});
      continue;
    }
    operation->finish();
    if (!operation->error()) {
      const CallOut call_out;
      hooks_->on_completion.call_all(operation->completion_key());
    }
  }
  const std::lock_guard lock(mutex_);
  if (launch_) {
    left.push_back(*launch_);
  }
  return left;
}

void CudaGroup::look_at(const std::vector<Awaited>& left) {
  const auto late = std::find_if(left.begin(), left.end(),
                                 [](const Awaited& one) { return one.deadline.has_passed(); });
  if (late != left.end()) {
    stop(describe_timeout(*late), false);
    return;
  }
  if (++looks_ % kLooksPerCheckup != 0) {
    return;
  }
  for (const std::shared_ptr<CudaLane>& lane : lanes()) {
    if (const auto error = lane->transport().check_async_error()) {
      stop(with_dead_peer(concat(left.front().text(), ": ", *error)), true);
      return;
    }
  }
  if (!peer_died_at_) {
    dead_peer_ = find_dead_peer();
    if (!dead_peer_.empty()) {
      peer_died_at_ = Clock::now();
    }
  } else if (Clock::now() - *peer_died_at_ > kGraceAfterDeath) {
    stop(concat(left.front().text(), ": ", dead_peer_,
                " has ended, and the operation can not complete without it."),
         true);
  }
}

void CudaGroup::check_peers(const std::string& communicator, std::optional<int> only) const {
  if (const std::string dead = find_dead_peer(only); !dead.empty()) {
    throw PeerLostError(concat("communicator '", communicator, "': ", dead,
                               " has ended, and the ranks have not all connected yet."));
  }
}

std::string CudaGroup::find_dead_peer(std::optional<int> only) const {
  const auto group = group_.lock();
  if (!group || !group->shared()) {
    return "";
  }
  const Peers& peers = group->shared()->peers;
  for (int peer = 0; peer < peers.n_ranks(); ++peer) {
    const Peer& one = peers.peers[static_cast<std::size_t>(peer)];
    if (peer != peers.rank && (!only || *only == peer) && one.liveness_fd &&
        has_ended(one.liveness_fd.get())) {
      return peers.describe(peer);
    }
  }
  return "";
}

std::string CudaGroup::with_dead_peer(const std::string& reason) const {
  const auto group = group_.lock();
  if (!group || !group->shared()) {
    return reason;  // nobody can be seen
  }
  return with_the_dead(reason, [this] {
    const std::string dead = find_dead_peer();
    return dead.empty() ? dead : dead + " has ended";
  });
}

// NCCL has no arrival phase, so ranks tell each other through the store how far they have come.
std::string CudaGroup::describe_timeout(const Awaited& late) {
  const std::string what = concat(late.text(), ": Timed out waiting ",
                                  late.deadline.timeout().count(), "ms for the GPUs. ");
  try {
    StoreAdapter store(store_);
    const std::uint64_t own = last_sequence_.load(std::memory_order_relaxed);
    const auto key = [](int rank) { return concat("horon/cuda/progress/", rank); };
    store.set(key(rank_), std::to_string(own));
    const Deadline patience = Deadline::after(kReportPatience);
    std::vector<int> silent;
    std::vector<int> behind;
    for (int peer = 0; peer < n_ranks_; ++peer) {
      if (peer == rank_) {
        continue;
      }
      try {
        if (std::stoull(store.get(key(peer), patience)) < late.sequence) {
          behind.push_back(peer);
        }
      } catch (const TimeoutError&) {
        silent.push_back(peer);
      }
    }
    std::string who;
    if (!behind.empty()) {
      who += concat("Not called by ", name_ranks(behind), ". ");
    }
    if (!silent.empty()) {
      who += concat("No sign of ", name_ranks(silent),
                    " (not in an operation of this group, stopped, or gone). ");
    }
    if (who.empty()) {
      who = "All ranks have called it: their calls differ, or a GPU or the network hangs. ";
    }
    return what + who;
  } catch (const std::exception& error) {
    return concat(what, "(How far the others are is unknown: ", error.what(), ")");
  }
}

// Ends everything of this group. Called where nothing may be thrown.
void CudaGroup::stop(const std::string& reason, bool is_peer_lost) noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) {
        return;
      }
      failure_ = reason;
    }
    log_warning(concat("rank ", rank_, ": ", reason));
    const auto error = translated(is_peer_lost ? std::make_exception_ptr(PeerLostError(reason))
                                               : std::make_exception_ptr(GroupError(reason)));
    for (const OperationPtr& operation : pending()) {
      operation->fail(error);
    }
    hooks_->on_abort->call_all_beside();
    if (const auto group = group_.lock()) {
      group->abort(reason);  // which comes back to abort()
    } else {
      abort(reason);
    }
  } catch (const std::exception& error) {
    log_warning(
        concat("rank ", rank_, ": ending the group after \"", reason, "\" failed: ", error.what()));
  }
}

}  // namespace horon::torch_backend
