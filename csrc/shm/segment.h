// The memory that the ranks of a group on one host share, and what lies where in it.
//
// What ranks wait for are 32-bit counters that grow and wrap: futex words. The order of
// memory:
//   SegmentHead | RankWords[n] | deposit rings [n] | data rings [n] | message rings [n][n]
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/options.h"
#include "shm/mapping.h"

namespace horon {

inline constexpr std::size_t kCacheLineBytes = 64;
inline constexpr std::size_t kPoisonTextBytes = 1000;

struct CounterWord {
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> waiters;  // how many sleep on `value`
};

// See Note [Claiming] in claims.h. Both hold a round's number and how far it is.
struct ClaimWords {
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> claimed;
  CounterWord done;
};

// What belongs to no rank. Why the group ended is written once, by the first that gives up.
struct SegmentHead {
  std::uint64_t nonce;
  // 0: healthy. 1: somebody is writing the text. 2: poisoned, text is valid.
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> poison;
  std::uint64_t poisoned_sequence;  // the first operation that fails
  char poison_text[kPoisonTextBytes];
  ClaimWords claims[2];
};

// What a rank counts and others wait for: see StepBoard.
enum class Counter : std::uint8_t {
  kArrived,   // operations that this rank has arrived at
  kStep,      // steps of large operations that it has finished
  kFinished,  // operations that it is done with: what was deposited for them may be overwritten
};
inline constexpr int kCounters = 3;

// The words that one rank writes and the others watch.
struct RankWords {
  CounterWord counters[kCounters];
  CounterWord& counter(Counter which) { return counters[static_cast<int>(which)]; }
  // 1: said goodbye and will take no further step.
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> departed;
  // One more than the core it was on when it last waited; 0: not told. See core_spread.h.
  std::atomic<std::uint32_t> core_plus_one;
  // Where its process can be asked what it does, see WatchPost; 0: nowhere.
  std::atomic<std::uint64_t> watch_post;
  // Rung when there may be something new in a ring to or from this rank.
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> doorbell;
  std::atomic<std::uint32_t> doorbell_waiters;
  // Of rank 0; see Note [Meetings] in named_engine.h.
  std::atomic<std::uint32_t> given_up_meeting;
};

// One direction between two ranks: a stream of bytes. The positions only grow.
struct RingWords {
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> written;   // by the sender
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> consumed;  // by the receiver
};

// Sizes and offsets, the same on all ranks. Pure.
class SegmentLayout {
 public:
  SegmentLayout(int n_ranks, const Options& options);

  int n_ranks() const { return n_ranks_; }
  std::size_t inline_bytes() const { return inline_bytes_; }
  std::size_t deposit_bytes() const { return deposit_bytes_; }
  std::size_t buffer_bytes() const { return buffer_bytes_; }
  std::size_t ring_bytes() const { return ring_bytes_; }
  // What a group will surely touch; rings are touched pair by pair, when a pair talks.
  std::size_t reserved_bytes() const { return rings_offset_; }
  std::size_t total_bytes() const { return total_bytes_; }

  std::size_t words_offset(int rank) const;
  std::size_t deposits_offset(int rank) const;
  std::size_t data_offset(int rank) const;
  std::size_t ring_offset(int source, int destination) const;

 private:
  int n_ranks_;
  std::size_t inline_bytes_;
  std::size_t buffer_bytes_;
  std::size_t ring_bytes_;
  std::size_t deposit_bytes_;
  std::size_t deposits_offset_;
  std::size_t data_offset_;
  std::size_t rings_offset_;
  std::size_t total_bytes_;
};

// A mapped segment. Ownership: owns the mapping; everything that it hands out is a view.
class Segment {
 public:
  Segment(Mapping mapping, const SegmentLayout& layout)
      : mapping_(std::move(mapping)), layout_(layout) {}

  const SegmentLayout& layout() const { return layout_; }
  SegmentHead& head() const { return *at<SegmentHead>(0); }
  RankWords& words(int rank) const { return *at<RankWords>(layout_.words_offset(rank)); }
  // The ring of what this rank deposits: deposit_bytes() long.
  std::byte* deposits(int rank) const { return mapping_.data() + layout_.deposits_offset(rank); }
  // The ring that this rank's large messages pass through: buffer_bytes() long; see DataRing.
  std::byte* data(int rank) const { return mapping_.data() + layout_.data_offset(rank); }
  RingWords& ring_words(int source, int destination) const {
    return *at<RingWords>(layout_.ring_offset(source, destination));
  }
  std::byte* ring_data(int source, int destination) const {
    return mapping_.data() + layout_.ring_offset(source, destination) + sizeof(RingWords);
  }

  // Marks the group as ended from operation `sequence` on and wakes everybody. Only the first call
  // counts.
  void poison(std::uint64_t sequence, const std::string& text);
  bool is_poisoned() const;
  // Whether this operation fails. A rank that is behind may still finish what came before.
  bool is_poisoned(std::uint64_t sequence) const;
  std::string poison_text() const;

  // Announces that this rank takes no further step, and wakes whoever waits for it.
  void depart(int rank);

  // Wakes everything that sleeps on a word of this segment, so that it looks around.
  void wake_all();

 private:
  void take_over_poisoning();
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(mapping_.data() + offset);
  }

  Mapping mapping_;
  SegmentLayout layout_;
};

}  // namespace horon
