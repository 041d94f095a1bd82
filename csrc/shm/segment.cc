#include "shm/segment.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/futex.h"
#include "core/header.h"
#include "core/round_up.h"

namespace horon {
namespace {

constexpr std::size_t kPageBytes = 4096;

enum PoisonState : std::uint32_t { kHealthy = 0, kWriting = 1, kPoisoned = 2 };

}  // namespace

SegmentLayout::SegmentLayout(int n_ranks, const Options& options)
    : n_ranks_(n_ranks),
      inline_bytes_(options.inline_bytes),
      // A quarter of it holds a cache line at least for each rank, however many there are.
      buffer_bytes_(round_up(
          std::max(options.buffer_bytes, 4 * static_cast<std::size_t>(n_ranks) * kCacheLineBytes),
          kPageBytes)),
      ring_bytes_(options.ring_bytes != 0 ? options.ring_bytes : automatic_ring_bytes(n_ranks)) {
  const auto n = static_cast<std::size_t>(n_ranks);
  // Room for a few of the largest deposits, however many ranks there are.
  const std::size_t largest = round_up(header_bytes(n_ranks) + inline_bytes_, kCacheLineBytes);
  deposit_bytes_ = round_up(std::max(options.deposit_bytes, 4 * largest), kPageBytes);
  deposits_offset_ = round_up(sizeof(SegmentHead) + n * sizeof(RankWords), kPageBytes);
  data_offset_ = deposits_offset_ + n * deposit_bytes_;
  rings_offset_ = data_offset_ + n * buffer_bytes_;
  total_bytes_ = rings_offset_ + n * n * round_up(sizeof(RingWords) + ring_bytes_, kPageBytes);
}

std::size_t SegmentLayout::words_offset(int rank) const {
  return sizeof(SegmentHead) + static_cast<std::size_t>(rank) * sizeof(RankWords);
}

std::size_t SegmentLayout::deposits_offset(int rank) const {
  return deposits_offset_ + static_cast<std::size_t>(rank) * deposit_bytes_;
}

std::size_t SegmentLayout::data_offset(int rank) const {
  return data_offset_ + static_cast<std::size_t>(rank) * buffer_bytes_;
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
  } else if (expected == kWriting) {
    take_over_poisoning();
  }
  wake_all();
}

// A rank that dies (or is stopped) while it writes the text must not keep the others from failing.
void Segment::take_over_poisoning() {
  constexpr int kPatience = 50;  // milliseconds; it is a matter of nanoseconds
  for (int i = 0; i < kPatience && !is_poisoned(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::uint32_t expected = kWriting;
  // Release: as in poison(). What the text says then is what came of it, and it ends in any case.
  head().poison.compare_exchange_strong(expected, kPoisoned, std::memory_order_acq_rel);
}

bool Segment::is_poisoned() const {
  // Acquire: pairs with the release in poison(), for the text.
  return head().poison.load(std::memory_order_acquire) == kPoisoned;
}

bool Segment::is_poisoned(std::uint64_t sequence) const {
  return is_poisoned() && sequence >= head().poisoned_sequence;
}

std::string Segment::poison_text() const {
  const std::string text = head().poison_text;
  return text.empty() ? "a rank failed, and died before it could say why" : text;
}

void Segment::depart(int rank) {
  // Release: whoever sees the departure sees every step taken before it.
  words(rank).departed.store(1, std::memory_order_release);
  wake_all();
}

void Segment::wake_all() {
  for (const ClaimWords& claims : head().claims) {
    futex_wake_all(claims.done.value);
  }
  for (int rank = 0; rank < layout_.n_ranks(); ++rank) {
    RankWords& watched = words(rank);
    for (const CounterWord& counter : watched.counters) {
      futex_wake_all(counter.value);
    }
    // Sleepers on a doorbell compare its value, so it has to change for a late sleeper to notice.
    watched.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(watched.doorbell);
  }
}

}  // namespace horon
