#include "shm/deposits.h"

#include <algorithm>

#include "core/published_stream.h"
#include "core/round_up.h"

namespace horon {
namespace {

std::size_t round_up_to_line(std::size_t bytes) { return round_up(bytes, kCacheLineBytes); }

}  // namespace

Deposits::Deposits(Segment* segment, StepBoard* board, SharedStore* store, int rank)
    : segment_(segment),
      board_(board),
      store_(store),
      rank_(rank),
      n_ranks_(segment->layout().n_ranks()),
      ring_bytes_(segment->layout().deposit_bytes()),
      inline_bytes_(segment->layout().inline_bytes()),
      largest_(round_up_to_line(header_bytes(n_ranks_) + inline_bytes_)),
      read_at_(static_cast<std::size_t>(n_ranks_), 0),
      under_way_(kMostUnderWay),
      headers_(static_cast<std::size_t>(n_ranks_)) {}

std::size_t Deposits::length(const Header& header) const {
  return round_up_to_line(header_bytes(header, n_ranks_) +
                          (header.is_inline != 0 ? header.published_bytes : 0));
}

std::size_t Deposits::start_after(std::size_t begin, const Header& header) const {
  const std::size_t end = begin + length(header);
  return end + largest_ <= ring_bytes_ ? end : 0;
}

std::uint64_t Deposits::oldest_unfinished() const {
  std::uint64_t oldest = current_;
  for (int peer = 0; peer < n_ranks_; ++peer) {
    if (peer != rank_) {
      // Acquire: the peer's reading is over before we overwrite what it read. The counter holds the
      // low half of the number; peers are at most kMostUnderWay behind.
      const std::uint32_t finished =
          segment_->words(peer).counter(Counter::kFinished).value.load(std::memory_order_acquire);
      const std::uint32_t behind = static_cast<std::uint32_t>(next_) - finished;
      oldest = std::min(oldest, next_ - behind);
    }
  }
  return oldest;
}

bool Deposits::has_room() {
  const auto fits = [&] {
    if (freed_ == next_) {
      return true;
    }
    if (next_ - freed_ >= kMostUnderWay) {
      return false;
    }
    const std::size_t occupied_from = under_way_[freed_ % kMostUnderWay].begin;
    // In use is [occupied_from, write_at_), around the end of the ring if need be.
    return occupied_from < write_at_ || write_at_ + largest_ <= occupied_from;
  };
  if (fits()) {
    return true;
  }
  freed_ = oldest_unfinished();
  return fits();
}

void Deposits::await_room(const WaitContext& context) {
  while (!has_room()) {
    // One at a time: whoever is behind has at least one more to finish.
    board_->await_all(Counter::kFinished, static_cast<std::uint32_t>(freed_) + 1, context);
  }
}

bool Deposits::has_room_to_start(std::uint64_t longest) {
  // On a ring, operations take up their lengths and, where it wraps, less than the largest one;
  // another largest one has to fit besides.
  const std::size_t most = round_up_to_line(header_bytes(n_ranks_) + longest);
  return under_way_bytes_ + most + 2 * largest_ <= ring_bytes_ && has_room();
}

void Deposits::deposit(const Request& request, std::uint64_t arena_offset, std::uint64_t longest) {
  std::byte* const at = segment_->deposits(rank_) + write_at_;
  Header header = make_header(request, next_, rank_, n_ranks_);
  header.arena_offset = arena_offset;
  header.is_inline = header.is_refused == 0 && header.published_bytes <= inline_bytes_ ? 1 : 0;
  write_header(at, header, request, n_ranks_);
  if (header.is_inline != 0) {
    copy_from_stream(stream_pieces(request, rank_, n_ranks_), 0, header.published_bytes,
                     at + header_bytes(header, n_ranks_),
                     [this](std::byte* to, const std::byte* from, std::size_t bytes) {
                       store_->copy(to, from, bytes);
                     });
  }
  const std::size_t most =
      std::max(length(header), round_up_to_line(header_bytes(header, n_ranks_) + longest));
  under_way_[next_ % kMostUnderWay] = {write_at_, most};
  under_way_bytes_ += most;
  write_at_ = start_after(write_at_, header);
  ++next_;
  board_->advance(Counter::kArrived);
}

void Deposits::finish() {
  for (std::size_t peer = 0; peer < read_at_.size(); ++peer) {
    read_at_[peer] = start_after(read_at_[peer], *headers_[peer].header);
  }
  under_way_bytes_ -= under_way_[current_ % kMostUnderWay].most_bytes;
  ++current_;
  board_->advance(Counter::kFinished);
}

void Deposits::look_at_current() {
  for (int peer = 0; peer < n_ranks_; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    headers_[p] = read_header(segment_->deposits(peer) + read_at_[p], n_ranks_);
  }
}

}  // namespace horon
