#include "shm/range_allocator.h"

#include <algorithm>
#include <random>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

constexpr std::uint64_t kPage = RangeAllocator::kPageBytes;

// The same rules, slowly: every byte unit has an owner.
class SlowAllocator {
 public:
  explicit SlowAllocator(std::uint64_t capacity) : used_(capacity / 64, 0) {}

  std::optional<ByteRange> allocate(std::uint64_t bytes) const {
    const std::uint64_t unit = bytes >= RangeAllocator::kPageAlignedFrom ? kPage / 64 : 1;
    const std::uint64_t needed = ((bytes + 63) / 64 + unit - 1) / unit * unit;
    std::optional<ByteRange> best;
    std::uint64_t best_length = 0;
    for (std::size_t begin = 0; begin < used_.size();) {
      if (used_[begin] != 0) {
        ++begin;
        continue;
      }
      std::size_t end = begin;
      while (end < used_.size() && used_[end] == 0) {
        ++end;
      }
      const std::uint64_t start = (begin + unit - 1) / unit * unit;
      if (start + needed <= end && (!best || end - begin < best_length)) {
        best = ByteRange{start * 64, needed * 64};
        best_length = end - begin;
      }
      begin = end;
    }
    return best;
  }
  void set(const ByteRange& range, bool used) {
    std::fill_n(used_.begin() + static_cast<std::ptrdiff_t>(range.offset / 64), range.bytes / 64,
                static_cast<char>(used));
  }

 private:
  std::vector<char> used_;  // not of bool: its iterators are slow under sanitizers
};

}  // namespace

TEST_CASE("ranges: sizes and alignment") {
  struct Row {
    std::uint64_t bytes;
    std::uint64_t taken;
    std::uint64_t alignment;
  };
  const std::vector<Row> rows{{1, 64, 64},
                              {64, 64, 64},
                              {65, 128, 64},
                              {8 * kPage - 1, 8 * kPage, 64},
                              {8 * kPage, 8 * kPage, kPage},
                              {8 * kPage + 1, 9 * kPage, kPage}};
  for (const Row& row : rows) {
    RangeAllocator ranges(100 * kPage);
    REQUIRE(ranges.allocate(1));  // so that offset 0 is taken
    const auto block = ranges.allocate(row.bytes);
    INFO(row.bytes);
    REQUIRE(block);
    REQUIRE(block->bytes == row.taken);
    REQUIRE(block->offset % row.alignment == 0);
  }
}

TEST_CASE("ranges: best fit, neighbours joined, nothing left at the end") {
  RangeAllocator ranges(16 * kPage);
  std::vector<ByteRange> blocks;
  for (const std::uint64_t bytes : {1024, 64, 256, 64, 512, 64}) {
    blocks.push_back(*ranges.allocate(bytes));
  }
  for (const std::size_t i : {0U, 2U, 4U}) {
    const auto joined = ranges.free(blocks[i].offset);
    REQUIRE(joined);
    REQUIRE(joined->bytes == blocks[i].bytes);
  }
  REQUIRE(ranges.allocate(200)->offset == blocks[2].offset);  // the hole of 256, not of 1024
  REQUIRE(ranges.allocate(500)->offset == blocks[4].offset);
  REQUIRE(ranges.free(blocks[2].offset));
  const auto joined = ranges.free(blocks[1].offset);  // holes on both sides
  REQUIRE(joined->offset == 0);
  REQUIRE(joined->bytes == 1024 + 64 + 256);
  for (const std::size_t i : {3U, 4U, 5U}) {
    REQUIRE(ranges.free(blocks[i].offset));
  }
  REQUIRE(ranges.used_bytes() == 0);
  REQUIRE(ranges.largest_free_bytes() == 16 * kPage);
  REQUIRE(ranges.free_ranges().size() == 1);
}

TEST_CASE("ranges: what does not fit, or was not given out") {
  RangeAllocator ranges(4 * kPage);
  REQUIRE_FALSE(ranges.allocate(4 * kPage + 1));
  REQUIRE_FALSE(ranges.allocate(~std::uint64_t{0}));
  const auto all = ranges.allocate(4 * kPage);
  REQUIRE(all);
  REQUIRE_FALSE(ranges.allocate(1));
  REQUIRE(ranges.largest_free_bytes() == 0);
  REQUIRE_FALSE(ranges.free(64));
  REQUIRE(ranges.free(0));
  REQUIRE_FALSE(ranges.free(0));
  RangeAllocator none(0);
  REQUIRE_FALSE(none.allocate(1));
}

TEST_CASE("ranges: a quarantined block stays in use") {
  RangeAllocator ranges(4 * kPage);
  const auto first = ranges.allocate(1000);
  const auto second = ranges.allocate(1000);
  REQUIRE(ranges.quarantine(second->offset + 500));  // anywhere inside
  REQUIRE(ranges.quarantine(second->offset));        // twice is once
  REQUIRE(ranges.quarantined_bytes() == second->bytes);
  REQUIRE_FALSE(ranges.quarantine(second->end()));
  REQUIRE_FALSE(ranges.free(second->offset));
  REQUIRE(ranges.free(first->offset));
  REQUIRE(ranges.used_bytes() == second->bytes);
  for (int i = 0; i < 1000; ++i) {
    const auto block = ranges.allocate(64);
    if (!block) {
      break;
    }
    REQUIRE((block->end() <= second->offset || block->offset >= second->end()));
  }
}

TEST_CASE("ranges: a pinned block is given back when it is free and nobody pins it") {
  RangeAllocator ranges(kPage);
  const auto first = ranges.allocate(64);
  const auto second = ranges.allocate(128);
  REQUIRE(ranges.pin(second->offset + 100) == second->offset);
  REQUIRE(ranges.pin(second->offset) == second->offset);
  REQUIRE_FALSE(ranges.pin(second->end()));
  REQUIRE_FALSE(ranges.free(second->offset));
  REQUIRE_FALSE(ranges.free(second->offset));
  REQUIRE(ranges.used_bytes() == 192);
  REQUIRE_FALSE(ranges.unpin(second->offset));
  REQUIRE(ranges.unpin(second->offset));
  REQUIRE(ranges.used_bytes() == 64);
  REQUIRE_FALSE(ranges.unpin(second->offset));
  // Unpinned before it is freed.
  REQUIRE(ranges.pin(first->offset) == first->offset);
  REQUIRE_FALSE(ranges.unpin(first->offset));
  REQUIRE(ranges.free(first->offset));
  // Quarantined in between: stays.
  const auto third = ranges.allocate(64);
  ranges.pin(third->offset);
  REQUIRE_FALSE(ranges.free(third->offset));
  ranges.quarantine(third->offset);
  REQUIRE_FALSE(ranges.unpin(third->offset));
  REQUIRE(ranges.used_bytes() == 64);
}

TEST_CASE("ranges: random calls against a slow allocator with the same rules") {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    constexpr std::uint64_t kCapacity = 64 * kPage;
    RangeAllocator ranges(kCapacity);
    SlowAllocator slow(kCapacity);
    std::vector<ByteRange> live;
    std::uint64_t used = 0;
    for (int call = 0; call < 800; ++call) {
      if (random() % 5 < 3) {
        const std::uint64_t bytes = 1 + random() % (random() % 4 == 0 ? 12 * kPage : 2000);
        const auto expected = slow.allocate(bytes);
        const auto block = ranges.allocate(bytes);
        REQUIRE(block.has_value() == expected.has_value());
        if (block) {
          REQUIRE(block->offset == expected->offset);
          REQUIRE(block->bytes == expected->bytes);
          slow.set(*block, true);
          live.push_back(*block);
          used += block->bytes;
        }
      } else if (!live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        REQUIRE(ranges.free(live.back().offset));
        slow.set(live.back(), false);
        used -= live.back().bytes;
        live.pop_back();
      }
      REQUIRE(ranges.used_bytes() == used);
    }
    for (const ByteRange& block : live) {
      REQUIRE(ranges.free(block.offset));
    }
    REQUIRE(ranges.largest_free_bytes() == kCapacity);
  }
}
