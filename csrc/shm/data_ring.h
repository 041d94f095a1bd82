// Where in the ranks' data rings the next piece of a large message goes.
//
// Note [Data rings]
// Large messages pass through a ring of memory per rank, piece by piece. A piece takes the same
// place in every rank's ring, and of two pieces that follow each other neither overlaps the other,
// because a piece takes at most a quarter of the ring. A piece is written before a step and read by
// others after it (or written, see Note [Swapping] in swap_with_peers.cc); the place is written
// again two pieces later at the earliest, and by then everybody has finished the step of the piece
// between, which comes after their reading. So pieces need no exit barrier, and operations follow
// each other without one. A place that nobody reads in another rank's ring any more may be given
// back and taken again at once: its lines are then still in this rank's cache. The rings are larger
// than that needs, for what goes one way: what a peer has read stays in its private cache for a
// while, and storing into such a line was measured to cost four times as much as into one that has
// moved on to the shared cache.
#pragma once

#include <algorithm>
#include <cstddef>

#include "core/round_up.h"
#include "shm/segment.h"

namespace horon {

// Pure but for its position, which is the same on all ranks. Thread safety: none.
class DataRing {
 public:
  // Pieces beyond this gain nothing, and the caches should hold a few.
  static constexpr std::size_t kMostPieceBytes = std::size_t{512} * 1024;

  explicit DataRing(std::size_t bytes) : bytes_(bytes) {}

  // The largest piece, a whole number of cache lines.
  std::size_t most_bytes() const {
    return std::min(bytes_ / 4, kMostPieceBytes) / kCacheLineBytes * kCacheLineBytes;
  }

  // Where a piece of so many bytes would begin.
  std::size_t next(std::size_t bytes) const { return at_ + bytes <= bytes_ ? at_ : 0; }

  // Takes that place.
  std::size_t take(std::size_t bytes) {
    const std::size_t begin = next(bytes);
    at_ = begin + round_up(bytes, kCacheLineBytes);
    return begin;
  }

  // Gives back the place that was taken last, which begins there.
  void give_back(std::size_t begin) { at_ = begin; }

 private:
  std::size_t bytes_;
  std::size_t at_ = 0;
};

}  // namespace horon
