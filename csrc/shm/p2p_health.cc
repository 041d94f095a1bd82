// P2pEngine: what time and the death of others do to pending messages.

#include <algorithm>

#include "core/error.h"
#include "core/rank_list.h"
#include "shm/p2p_engine.h"

namespace horon {
namespace {

constexpr std::chrono::seconds kBufferedAfter{1};

enum class Fate { kHere, kLeft, kDied };

// What has become of the ranks.
struct Fates {
  std::vector<Fate> of;  // by rank
  std::string died;      // who, for messages
  bool is_alone = true;  // nobody else is here
};

Fates look_at_peers(const Segment& segment, const Peers& peers) {
  Fates fates;
  fates.of.resize(peers.peers.size(), Fate::kHere);
  for (int peer = 0; peer < peers.n_ranks(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    if (segment.words(peer).departed.load(std::memory_order_acquire) != 0) {
      fates.of[index] = Fate::kLeft;
    } else if (has_ended(peers.peers[index].liveness_fd.get())) {
      fates.of[index] = Fate::kDied;
      fates.died += (fates.died.empty() ? "" : ", ") + peers.describe(peer);
    } else if (peer != peers.rank) {
      fates.is_alone = false;
    }
  }
  return fates;
}

// Why an operation that needs `peer` can not go on; null when it can.
std::exception_ptr verdict(const P2pOp& op, int peer, const Fates& fates, const Peers& peers) {
  std::string lost;
  if (peer == kAnySource) {
    if (!fates.died.empty()) {
      lost = fates.died + " died";
    } else if (fates.is_alone) {
      lost = "all other ranks left the group";
    }
  } else if (const Fate fate = fates.of[static_cast<std::size_t>(peer)]; fate != Fate::kHere) {
    lost = concat(peers.describe(peer), fate == Fate::kLeft ? " left the group" : " died");
  }
  if (!lost.empty()) {
    return std::make_exception_ptr(PeerLostError(concat(op.describe(), ": ", lost, ".")));
  }
  if (op.deadline.has_passed()) {
    const std::string whom =
        peer == kAnySource ? "any rank" : name_ranks({peer}, peers.global_ranks);
    return std::make_exception_ptr(TimeoutError(concat(
        op.describe(), ": Timed out waiting ", op.deadline.timeout().count(), "ms for ", whom)));
  }
  return nullptr;
}

}  // namespace

void P2pEngine::look_around() {
  if (segment_->is_poisoned()) {
    fail_all(segment_->poison_text());
    closed_ = segment_->poison_text();
    return;
  }
  const Fates fates = look_at_peers(*segment_, *peers_);
  pump();  // what they sent before they went still counts

  std::string poison;
  const auto judge = [&](const Op& op, int peer) {
    const std::exception_ptr error = verdict(*op, peer, fates, *peers_);
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
  for (std::size_t peer = 0; peer < fates.of.size(); ++peer) {
    if (fates.of[peer] != Fate::kHere) {
      outgoing_[peer].control.clear();
    }
  }
  if (!poison.empty()) {
    segment_->poison(0, poison);
  }
}

}  // namespace horon
