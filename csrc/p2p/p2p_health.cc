// P2pEngine: what time and the death of others do to pending messages.

#include <algorithm>

#include "core/error.h"
#include "core/rank_list.h"
#include "p2p/p2p_engine.h"
#include "shm/late_rank.h"
#include "watch/long_wait.h"

namespace horon {
namespace {

constexpr std::chrono::seconds kBufferedAfter{1};

}  // namespace

// What has become of the ranks.
struct P2pEngine::Fates {
  enum class Fate { kHere, kLeft, kDied };

  std::vector<Fate> of;  // by rank
  std::string died;      // who, and how, for messages
  bool is_alone = true;  // nobody else is here
};

std::string P2pEngine::describe(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  return local_[index] >= 0 ? peers_->describe(local_[index])
                            : outgoing_[index].socket->description();
}

std::string P2pEngine::how_lost(int peer) const {
  const MessageSocket* socket = outgoing_[static_cast<std::size_t>(peer)].socket;
  return socket == nullptr || socket->why_lost().empty()
             ? " died"
             : concat(" can not be reached any more (", socket->why_lost(), ")");
}

P2pEngine::Fates P2pEngine::look_at_peers() const {
  using Fate = Fates::Fate;
  const auto fate_of = [&](std::size_t peer) {
    if (const MessageSocket* socket = outgoing_[peer].socket; socket != nullptr) {
      return socket->state() == MessageSocket::State::kOpen   ? Fate::kHere
             : socket->state() == MessageSocket::State::kLeft ? Fate::kLeft
                                                              : Fate::kDied;
    }
    const int local = local_[peer];
    if (segment_->words(local).departed.load(std::memory_order_acquire) != 0) {
      return Fate::kLeft;
    }
    const auto index = static_cast<std::size_t>(local);
    return has_ended(peers_->peers[index].liveness_fd.get()) ? Fate::kDied : Fate::kHere;
  };
  Fates fates;
  for (std::size_t peer = 0; peer < local_.size(); ++peer) {
    const int rank = static_cast<int>(peer);
    fates.of.push_back(fate_of(peer));
    if (fates.of.back() == Fate::kDied) {
      fates.died += (fates.died.empty() ? "" : ", ") + describe(rank) + how_lost(rank);
    } else if (fates.of.back() == Fate::kHere && rank != rank_) {
      fates.is_alone = false;
    }
  }
  return fates;
}

// Why an operation that needs `peer` can not go on; null when it can.
std::exception_ptr P2pEngine::verdict(const P2pOp& op, int peer, const Fates& fates) const {
  using Fate = Fates::Fate;
  std::string lost;
  if (peer == kAnySource) {
    if (!fates.died.empty()) {
      lost = fates.died;
    } else if (fates.is_alone) {
      lost = "all other ranks left the group";
    }
  } else if (const Fate fate = fates.of[static_cast<std::size_t>(peer)]; fate != Fate::kHere) {
    lost = concat(describe(peer), fate == Fate::kLeft ? " left the group" : how_lost(peer));
  }
  if (!lost.empty()) {
    return std::make_exception_ptr(PeerLostError(concat(op.describe(), ": ", lost, ".")));
  }
  if (op.deadline.has_passed()) {
    const std::string whom = peer == kAnySource ? "any rank" : name_ranks({peer}, global_ranks_);
    return std::make_exception_ptr(TimeoutError(concat(
        op.describe(), ": Timed out waiting ", op.deadline.timeout().count(), "ms for ", whom)));
  }
  return nullptr;
}

std::shared_ptr<P2pOp> P2pEngine::find_awaited(const void* waiter) const {
  const auto is_it = [&](const Op& op) { return op->is_for(waiter); };
  if (const auto found = std::find_if(receives_.begin(), receives_.end(), is_it);
      found != receives_.end()) {
    return *found;
  }
  for (const auto& [key, op] : streams_) {
    if (is_it(op)) {
      return op;
    }
  }
  for (const auto& [id, op] : sends_) {
    if (is_it(op)) {
      return op;
    }
  }
  return nullptr;
}

void P2pEngine::look_at_wait(LongWait& wait, const P2pOp& op) const {
  wait.look(op.deadline, [&](bool) {
    Waiting waiting;
    waiting.operation = concat(name_ranks({rank_}, global_ranks_), ": ", op.describe());
    if (op.peer != kAnySource) {
      const int local = local_[static_cast<std::size_t>(op.peer)];
      const MessageSocket* socket = outgoing_[static_cast<std::size_t>(op.peer)].socket;
      waiting.late.push_back(local >= 0 ? late_rank(*segment_, *peers_, local)
                                        : LateRank{describe(op.peer), 0, "", socket->door()});
    }
    return waiting;
  });
}

// Whether an eager message reaches its peer even if this rank leaves.
bool P2pEngine::is_with_peer(const P2pOp& op) const {
  const MessageSocket* socket = outgoing_[static_cast<std::size_t>(op.peer)].socket;
  return socket == nullptr || (!socket->is_broken() && socket->delivered_until() >= op.put_until);
}

void P2pEngine::look_around() {
  if (segment_->is_poisoned()) {
    fail_all(segment_->poison_text());
    closed_ = segment_->poison_text();
    say_end(closed_);
    return;
  }
  const Fates fates = look_at_peers();
  pump();  // what they sent before they went still counts

  std::string poison;
  const auto judge = [&](const Op& op, int peer) {
    const std::exception_ptr error = verdict(*op, peer, fates);
    if (error) {
      if (op->deadline.has_passed()) {
        poison = concat("rank ", rank_, ": ", op->describe(), " timed out");
      }
      finish(op, error);
    }
    return static_cast<bool>(error);
  };

  const std::map<std::uint64_t, Op> sends = sends_;  // finish() changes the original
  for (const auto& [id, op] : sends) {
    const bool is_buffered = op->is_eager && op->buffered_at != Clock::time_point{};
    if (is_buffered && Clock::now() - op->buffered_at >= kBufferedAfter && is_with_peer(*op)) {
      finish(op);
    } else if (judge(op, op->peer)) {
      forget(op);
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
    if (fates.of[peer] != Fates::Fate::kHere) {
      outgoing_[peer].control.clear();
    }
  }
  if (!poison.empty()) {
    segment_->poison(0, poison);
    say_end(poison);
  }
}

}  // namespace horon
