// Which parts of a range of bytes are in use: best fit, with neighbours joined. Pure bookkeeping.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace horon {

struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  std::uint64_t end() const { return offset + bytes; }
};

// Thread safety: none.
// Invariants: blocks and free ranges do not overlap and cover [0, capacity); no two free ranges
// touch.
class RangeAllocator {
 public:
  static constexpr std::uint64_t kAlignment = 64;
  static constexpr std::uint64_t kPageBytes = 4096;
  // Blocks from this size on start on pages and are whole pages.
  static constexpr std::uint64_t kPageAlignedFrom = std::uint64_t{8} * kPageBytes;

  // Requires: capacity is a multiple of kPageBytes.
  explicit RangeAllocator(std::uint64_t capacity);

  // The smallest free range that fits, and of these the first. Nothing when none fits.
  // Requires: bytes > 0.
  std::optional<ByteRange> allocate(std::uint64_t bytes);

  // Gives a block back; returns the free range that it is part of now. Nothing when the block is
  // quarantined (it stays in use), when it is pinned (the last unpin gives it back), or when no
  // block starts there.
  std::optional<ByteRange> free(std::uint64_t offset);

  // The block around `offset` is never given out again, freed or not. False when there is none.
  bool quarantine(std::uint64_t offset);

  // The block around `offset` is not given out again, freed or not, until it has been unpinned as
  // often. Returns where it starts; nothing when there is none.
  std::optional<std::uint64_t> pin(std::uint64_t offset);
  // Requires: pin() returned `start`. Returns what free() would if the block goes free now.
  std::optional<ByteRange> unpin(std::uint64_t start);

  std::uint64_t capacity() const { return capacity_; }
  std::uint64_t used_bytes() const { return used_bytes_; }
  std::uint64_t quarantined_bytes() const { return quarantined_bytes_; }
  std::uint64_t largest_free_bytes() const;
  // Bytes by offset.
  const std::map<std::uint64_t, std::uint64_t>& free_ranges() const { return free_bytes_; }

 private:
  struct Block {
    std::uint64_t bytes = 0;
    bool is_quarantined = false;
    bool is_freed = false;  // while it was pinned
    std::uint32_t pins = 0;
  };

  std::map<std::uint64_t, Block>::iterator block_around(std::uint64_t offset);
  void add_free(const ByteRange& range);
  void remove_free(const ByteRange& range);

  const std::uint64_t capacity_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t quarantined_bytes_ = 0;
  std::map<std::uint64_t, Block> blocks_;                           // by offset
  std::map<std::uint64_t, std::uint64_t> free_bytes_;               // by offset
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;  // (bytes, offset)
};

}  // namespace horon
