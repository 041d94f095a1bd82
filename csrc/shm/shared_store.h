// Copies into memory that another rank has read, the fast way for this machine at this moment.
//
// Note [Streaming stores]
// A store to a cache line that another core holds has to fetch the line and to take it away from
// that core. Between cores that share a cache this costs little. Between others (two dies, two
// sockets, virtual CPUs that were moved apart) it was measured to be ten times slower than storing
// past the caches, while reading is about as fast either way. Within one cache, on the other hand,
// what was streamed has to come back from memory. So both are timed, and streaming is used where it
// is at least twice as fast. A fast copy counts at once, since only the way makes a copy fast; slow
// ones count little by little. It changes nothing but the time, so ranks need not agree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/deadline.h"
#include "shm/paired_choice.h"

namespace horon {

// Which way to store, from the speeds seen. Pure but for its memory.
class StoreChoice {
 public:
  enum class Way : std::uint8_t { kCached, kStreaming };

  Way way() const { return way_; }
  // Whether it is time to try the other way on a small part.
  bool wants_trial();
  // A copy of `bytes` bytes took `nanoseconds`.
  void record(Way way, std::size_t bytes, double nanoseconds);

 private:
  static constexpr std::uint32_t kCopiesBetweenTrials = 64;
  // The first copies into new memory wait for its pages: taken for what such a copy takes, they
  // made streaming look many times faster, for hundreds of copies.
  static constexpr std::uint32_t kCopiesBeforeFirstTrial = 8;
  static constexpr double kLeastAdvantage = 2;

  double cached_ = 0;     // nanoseconds per byte; 0: not known
  double streaming_ = 0;  // nanoseconds per byte; 0: not known
  std::uint32_t copies_ = 0;
  Way way_ = Way::kCached;
};

// memcpy past the caches, where the CPU can; what was written is visible to whoever sees a later
// store with release order.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes);

// Thread safety: none.
class SharedStore {
 public:
  explicit SharedStore(const StoreChoice& choice = {}) : choice_(choice) {}

  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  // Copies what a peer has left in `shared` to `to`, and then what is at `from` into `shared`; both
  // at once unless streaming. See line_copies.h.
  void swap(std::byte* to, std::size_t to_bytes, std::byte* shared, const std::byte* from,
            std::size_t from_bytes);
  // For callers that can store what they make without a copy, block by block: whether the next one
  // should come through copy() all the same, to stream it or to time it.
  bool wants_copy() { return is_streaming() || ++offered_ % kOfferedBlocks == 0; }
  // For results that are stored block by block: the caller asks once and copies itself.
  bool is_streaming() const { return choice_.way() == StoreChoice::Way::kStreaming; }
  // For results that are stored where inputs of peers have just been read: does a part of them by
  // act(asks), which first asks for its lines for writing, or does not, whichever is faster now.
  template <typename Act>
  void store_part(std::size_t bytes, const Act& act) {
    if (bytes < kLeastPartBytes || is_streaming()) {
      act(false);
      return;
    }
    const PairedChoice::Turn turn = asking_.next();
    const auto started = turn.is_timed ? Clock::now() : Clock::time_point{};
    act(turn.other);
    const std::chrono::duration<double, std::nano> took =
        turn.is_timed ? Clock::now() - started : Clock::duration(0);
    asking_.done(took.count() / static_cast<double>(bytes));
  }

 private:
  void copy_timed(StoreChoice::Way way, std::byte* to, const std::byte* from, std::size_t bytes);

  void copy_untimed(std::byte* to, const std::byte* from, std::size_t bytes) const;

  static constexpr std::uint32_t kOfferedBlocks = 16;
  // Below, a measurement is mostly noise.
  static constexpr std::size_t kLeastPartBytes = std::size_t{64} * 1024;

  StoreChoice choice_;
  PairedChoice asking_;
  std::uint32_t untimed_ = 0;
  std::uint32_t offered_ = 0;
};

}  // namespace horon
