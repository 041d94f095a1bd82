#include "shm/segment.h"

#include <algorithm>
#include <cstring>

#include "core/header.h"
#include "shm/futex.h"

namespace horon {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

constexpr std::size_t kPageBytes = 4096;

enum PoisonState : std::uint32_t { kHealthy = 0, kWriting = 1, kPoisoned = 2 };

}  // namespace

SegmentLayout::SegmentLayout(int n_ranks, const Options& options)
    : n_ranks_(n_ranks),
      inline_bytes_(options.inline_bytes),
      // A cache line at least for each rank, however many there are.
      buffer_bytes_(
          std::max(options.buffer_bytes, static_cast<std::size_t>(n_ranks) * kCacheLineBytes)),
      ring_bytes_(options.ring_bytes) {
  const auto n = static_cast<std::size_t>(n_ranks);
  slot_bytes_ = round_up(header_bytes(n_ranks) + inline_bytes_, kCacheLineBytes);
  slots_offset_ = sizeof(SegmentHead) + n * sizeof(RankWords);
  slots_offset_ = round_up(slots_offset_, kPageBytes);
  buffers_offset_ = round_up(slots_offset_ + 2 * n * slot_bytes_, kPageBytes);
  rings_offset_ = buffers_offset_ + 2 * n * round_up(buffer_bytes_, kPageBytes);
  total_bytes_ = rings_offset_ + n * n * round_up(sizeof(RingWords) + ring_bytes_, kPageBytes);
}

std::size_t SegmentLayout::words_offset(int rank) const {
  return sizeof(SegmentHead) + static_cast<std::size_t>(rank) * sizeof(RankWords);
}

std::size_t SegmentLayout::slot_offset(int parity, int rank) const {
  return slots_offset_ + static_cast<std::size_t>(parity * n_ranks_ + rank) * slot_bytes_;
}

std::size_t SegmentLayout::buffer_offset(int rank, int parity) const {
  return buffers_offset_ +
         static_cast<std::size_t>(2 * rank + parity) * round_up(buffer_bytes_, kPageBytes);
}

std::size_t SegmentLayout::ring_offset(int source, int destination) const {
  return rings_offset_ + static_cast<std::size_t>(source * n_ranks_ + destination) *
                             round_up(sizeof(RingWords) + ring_bytes_, kPageBytes);
}

void Segment::poison(std::uint64_t sequence, const std::string& text) {
  SegmentHead& head = this->head();
  std::uint32_t expected = kHealthy;
  // acq_rel: one winner, and the text below is published by the release store.
  if (head.poison.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) {
    const std::size_t length = std::min(text.size(), kPoisonTextBytes - 1);
    std::memcpy(head.poison_text, text.data(), length);
    head.poison_text[length] = '\0';
    head.poisoned_sequence = sequence;
    head.poison.store(kPoisoned, std::memory_order_release);
  }
  wake_all();
}

bool Segment::is_poisoned() const {
  // Acquire: pairs with the release in poison(), for the text.
  return head().poison.load(std::memory_order_acquire) == kPoisoned;
}

bool Segment::is_poisoned(std::uint64_t sequence) const {
  return is_poisoned() && sequence >= head().poisoned_sequence;
}

std::string Segment::poison_text() const { return head().poison_text; }

void Segment::depart(int rank) {
  // Release: whoever sees the departure sees every step taken before it.
  words(rank).departed.store(1, std::memory_order_release);
  wake_all();
}

void Segment::wake_all() {
  for (int rank = 0; rank < layout_.n_ranks(); ++rank) {
    RankWords& watched = words(rank);
    futex_wake_all(watched.step);
    // Sleepers on a doorbell compare its value, so it has to change for a late sleeper to notice.
    watched.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(watched.doorbell);
  }
}

}  // namespace horon
