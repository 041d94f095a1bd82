#include "shm/shm_control_channel.h"

#include <algorithm>

#include "core/error.h"
#include "shm/late_rank.h"

namespace horon {
namespace {

constexpr std::size_t kRingBytes = std::size_t{64} * 1024;
constexpr std::uint64_t kMaxMessageBytes = std::uint64_t{1} << 30;
// A few microseconds.
constexpr int kPauses = 100;

}  // namespace

Options ShmControlChannel::options(const Options& like) {
  Options options;
  options.inline_bytes = 0;
  options.deposit_bytes = 4096;
  options.buffer_bytes = 4096;
  options.ring_bytes = kRingBytes;
  options.eager_bytes = 0;
  options.claiming = "off";
  options.host_id = like.host_id;
  return options;
}

ShmControlChannel::ShmControlChannel(std::unique_ptr<SharedGroup> group)
    : group_(std::move(group)),
      segment_(&group_->segment),
      peers_(&group_->peers),
      own_(&segment_->words(peers_->rank)),
      own_bell_(doorbell_of(peers_->rank)),
      policy_(peers_->is_crowded),
      outgoing_(peers_->peers.size()),
      incoming_(peers_->peers.size()) {}

ShmControlChannel::ShmControlChannel(Segment* segment, const Peers* peers)
    : segment_(segment),
      peers_(peers),
      own_(&segment_->words(peers_->rank)),
      own_bell_(doorbell_of(peers_->rank)),
      policy_(peers_->is_crowded),
      outgoing_(peers_->peers.size()),
      incoming_(peers_->peers.size()) {}

Doorbell ShmControlChannel::doorbell_of(int rank) const {
  RankWords& words = segment_->words(rank);
  return {words.doorbell, words.doorbell_waiters};
}

void ShmControlChannel::send(int rank, Bytes bytes, bool is_urgent) {
  Outgoing& out = outgoing_[static_cast<std::size_t>(rank)];
  if (out.messages.empty()) {
    unsent_.push_back(rank);
  }
  out.messages.push_back(std::move(bytes));
  out.is_urgent = out.is_urgent || is_urgent;
}

bool ShmControlChannel::flush() {
  std::erase_if(unsent_, [this](int rank) { return write_to(rank); });
  return unsent_.empty();
}

// True when nothing is left. A message goes in as many frames as it takes; kData is one with more
// to come, kEager the last.
bool ShmControlChannel::write_to(int rank) {
  Outgoing& out = outgoing_[static_cast<std::size_t>(rank)];
  if (has_departed(rank)) {  // nobody reads it, or makes room, any more
    out.messages.clear();
    out.written = 0;
    out.is_urgent = false;
    return true;
  }
  Ring ring(*segment_, peers_->rank, rank);
  bool moved = false;
  while (!out.messages.empty()) {
    const Bytes& message = out.messages.front();
    const std::int64_t room = ring.writable_payload();
    const std::size_t left = message.size() - out.written;
    if (room < 0 || (room == 0 && left > 0)) {
      break;
    }
    Frame frame;
    frame.message_bytes = message.size();
    frame.payload_bytes = std::min<std::uint64_t>(left, static_cast<std::uint64_t>(room));
    frame.type = frame.payload_bytes == left ? FrameType::kEager : FrameType::kData;
    ring.write(frame, message.data() + out.written);
    moved = true;
    out.written += frame.payload_bytes;
    if (frame.type == FrameType::kEager) {
      out.messages.pop_front();
      out.written = 0;
    }
  }
  if (moved) {
    // What is left needs the reader.
    doorbell_of(rank).ring(out.is_urgent || !out.messages.empty());
  }
  out.is_urgent = out.is_urgent && !out.messages.empty();
  return out.messages.empty();
}

bool ShmControlChannel::receive(int* source, Bytes* bytes) {
  const int n_ranks = peers_->n_ranks();
  // Rank 0 is everybody's only correspondent, but its own.
  const int sources = peers_->rank == 0 ? n_ranks : 1;
  for (int i = 0; i < sources; ++i) {
    const int rank = (next_source_ + i) % sources;
    if (rank != peers_->rank && read_from(rank)) {
      next_source_ = (rank + 1) % sources;  // fair to all
      *source = rank;
      *bytes = std::exchange(incoming_[static_cast<std::size_t>(rank)], {});
      return true;
    }
  }
  return false;
}

// True when a message is complete.
bool ShmControlChannel::read_from(int rank) {
  Ring ring(*segment_, rank, peers_->rank);
  Bytes& message = incoming_[static_cast<std::size_t>(rank)];
  Frame frame;
  while (ring.peek(&frame)) {
    HORON_CHECK((frame.type == FrameType::kEager || frame.type == FrameType::kData) &&
                    frame.payload_bytes <= kRingBytes &&
                    message.size() + frame.payload_bytes <= kMaxMessageBytes,
                "the control ring from rank ", rank, " is damaged");
    const RingWords& words = segment_->ring_words(rank, peers_->rank);
    const bool was_full = words.written.load(std::memory_order_relaxed) -
                              words.consumed.load(std::memory_order_relaxed) >=
                          segment_->layout().ring_bytes() / 2;
    const std::size_t before = message.size();
    message.resize(before + frame.payload_bytes);
    ring.consume(frame, message.data() + before);
    if (was_full) {
      doorbell_of(rank).ring(true);  // it may wait for room
    }
    if (frame.type == FrameType::kEager) {
      return true;
    }
  }
  return false;
}

std::uint32_t ShmControlChannel::events() const { return own_bell_.count(); }

bool ShmControlChannel::spin(std::uint32_t seen) {
  return policy_.spin([&] { return own_->doorbell.load(std::memory_order_acquire) != seen; });
}

bool ShmControlChannel::linger(std::uint32_t seen, std::chrono::nanoseconds limit) {
  return policy_.linger([&] { return own_->doorbell.load(std::memory_order_acquire) != seen; },
                        peers_->linger_time, limit);
}

bool ShmControlChannel::pause(std::uint32_t seen) {
  for (int i = 0; i < kPauses && events() == seen; ++i) {
    pause_cpu();
  }
  return events() != seen;
}

void ShmControlChannel::sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) {
  own_bell_.sleep(sleeper, seen, limit);
}

void ShmControlChannel::wake() { own_bell_.ring(true); }

void ShmControlChannel::attend() { own_bell_.attend(); }

void ShmControlChannel::leave_to_background(bool only_urgent) {
  own_bell_.leave_to_background(only_urgent);
}

void ShmControlChannel::give_up_meeting(std::uint32_t meeting) {
  own_->given_up_meeting.store(meeting, std::memory_order_relaxed);
  for (int rank = 0; rank < peers_->n_ranks(); ++rank) {
    if (rank != peers_->rank) {
      doorbell_of(rank).ring(false);
    }
  }
}

std::uint32_t ShmControlChannel::given_up_meeting() const {
  return segment_->words(0).given_up_meeting.load(std::memory_order_relaxed);
}

bool ShmControlChannel::is_poisoned() { return segment_->is_poisoned(); }

std::string ShmControlChannel::failure() {
  if (segment_->is_poisoned()) {
    return segment_->poison_text();
  }
  for (int rank = 0; rank < peers_->n_ranks(); ++rank) {
    const Peer& peer = peers_->peers[static_cast<std::size_t>(rank)];
    if (rank != peers_->rank && !has_departed(rank) && has_ended(peer.liveness_fd.get()) &&
        !has_departed(rank)) {
      return concat(peers_->describe(rank), " died");
    }
  }
  return {};
}

bool ShmControlChannel::has_departed(int rank) {
  // Acquire: what it sent before can be received.
  return segment_->words(rank).departed.load(std::memory_order_acquire) != 0;
}

std::vector<LateRank> ShmControlChannel::late_ranks(const std::vector<int>& ranks) const {
  std::vector<LateRank> late;
  late.reserve(ranks.size());
  for (const int rank : ranks) {
    late.push_back(late_rank(*segment_, *peers_, rank));
  }
  return late;
}

void ShmControlChannel::poison(const std::string& reason) { segment_->poison(0, reason); }

void ShmControlChannel::depart() { segment_->depart(peers_->rank); }

}  // namespace horon
