// P2pEngine: what time and the death of others do to pending messages.

#include <algorithm>

#include "core/error.h"
#include "shm/p2p_engine.h"

namespace horon {
namespace {

constexpr std::chrono::seconds kBufferedAfter{1};

}  // namespace

void P2pEngine::look_around() {
  if (segment_->is_poisoned()) {
    fail_all(segment_->poison_text());
    closed_ = segment_->poison_text();
    return;
  }
  enum class Fate { kHere, kLeft, kDied };
  std::vector<Fate> fates(peers_->peers.size(), Fate::kHere);
  std::string died;
  int others_here = 0;
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    Fate& fate = fates[static_cast<std::size_t>(peer)];
    if (segment_->words(peer).departed.load(std::memory_order_acquire) != 0) {
      fate = Fate::kLeft;
    } else if (has_ended(peers_->peers[static_cast<std::size_t>(peer)].liveness_fd.get())) {
      fate = Fate::kDied;
      died += (died.empty() ? "" : ", ") + peers_->describe(peer);
    }
    others_here += peer != peers_->rank && fate == Fate::kHere ? 1 : 0;
  }
  pump();  // what they sent before they went still counts

  // Nothing when the operation can go on. `peer` is who it needs.
  const auto verdict = [&](const P2pOp& op, int peer) -> std::exception_ptr {
    std::string lost;
    if (peer == kAnySource) {
      if (!died.empty()) {
        lost = died + " died";
      } else if (others_here == 0) {
        lost = "all other ranks left the group";
      }
    } else if (const Fate fate = fates[static_cast<std::size_t>(peer)]; fate != Fate::kHere) {
      lost = concat(peers_->describe(peer), fate == Fate::kLeft ? " left the group" : " died");
    }
    if (!lost.empty()) {
      return std::make_exception_ptr(PeerLostError(concat(op.describe(), ": ", lost, ".")));
    }
    if (op.deadline.has_passed()) {
      return std::make_exception_ptr(TimeoutError(
          concat(op.describe(), ": Timed out waiting ", op.deadline.timeout().count(), "ms")));
    }
    return nullptr;
  };
  std::string poison;
  const auto judge = [&](const Op& op, int peer) {
    const std::exception_ptr error = verdict(*op, peer);
    if (error) {
      if (op->deadline.has_passed()) {
        poison = concat("rank ", peers_->rank, ": ", op->describe(), " timed out");
      }
      finish(op, error);
    }
    return static_cast<bool>(error);
  };

  const std::map<std::uint64_t, Op> sends = sends_;  // finish() changes the original
  for (const auto& [id, op] : sends) {
    const bool is_buffered = op->is_eager && op->buffered_at != Clock::time_point{};
    if (is_buffered && Clock::now() - op->buffered_at >= kBufferedAfter) {
      finish(op);
    } else if (judge(op, op->peer)) {
      auto& queue = outgoing_[static_cast<std::size_t>(op->peer)].messages;
      queue.erase(std::remove(queue.begin(), queue.end(), op), queue.end());
    }
  }
  receives_.remove_if([&](const Op& op) { return judge(op, op->peer); });
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    // One from any source has found its sender: nobody else can bring the rest.
    const int sender = stream->first.first;
    stream = judge(stream->second, sender) ? streams_.erase(stream) : std::next(stream);
  }
  // Messages to the dead are never read.
  for (std::size_t peer = 0; peer < fates.size(); ++peer) {
    if (fates[peer] != Fate::kHere) {
      outgoing_[peer].control.clear();
    }
  }
  if (!poison.empty()) {
    segment_->poison(0, poison);
  }
}

}  // namespace horon
