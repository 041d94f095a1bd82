#include "shm/range_allocator.h"

#include "core/round_up.h"

namespace horon {

RangeAllocator::RangeAllocator(std::uint64_t capacity) : capacity_(capacity) {
  if (capacity > 0) {
    add_free({0, capacity});
  }
}

std::optional<ByteRange> RangeAllocator::allocate(std::uint64_t bytes) {
  if (bytes > capacity_) {  // also keeps the rounding below from wrapping
    return std::nullopt;
  }
  const std::uint64_t alignment = bytes >= kPageAlignedFrom ? kPageBytes : kAlignment;
  const std::uint64_t needed = round_up(bytes, alignment);
  for (auto found = free_by_size_.lower_bound({needed, 0}); found != free_by_size_.end(); ++found) {
    const ByteRange range{found->second, found->first};
    const ByteRange block{round_up(range.offset, alignment), needed};
    if (block.end() > range.end()) {
      continue;  // only alignment is in the way: the next larger ones may do
    }
    remove_free(range);
    if (block.offset > range.offset) {
      add_free({range.offset, block.offset - range.offset});
    }
    if (block.end() < range.end()) {
      add_free({block.end(), range.end() - block.end()});
    }
    blocks_[block.offset].bytes = block.bytes;
    used_bytes_ += block.bytes;
    return block;
  }
  return std::nullopt;
}

std::optional<ByteRange> RangeAllocator::free(std::uint64_t offset) {
  const auto found = blocks_.find(offset);
  if (found == blocks_.end() || found->second.is_quarantined) {
    return std::nullopt;
  }
  if (found->second.pins > 0) {
    found->second.is_freed = true;
    return std::nullopt;
  }
  ByteRange range{offset, found->second.bytes};
  blocks_.erase(found);
  used_bytes_ -= range.bytes;
  const auto after = free_bytes_.find(range.end());
  if (after != free_bytes_.end()) {
    const ByteRange neighbour{after->first, after->second};
    remove_free(neighbour);
    range.bytes += neighbour.bytes;
  }
  auto before = free_bytes_.lower_bound(range.offset);
  if (before != free_bytes_.begin()) {
    --before;
    const ByteRange neighbour{before->first, before->second};
    if (neighbour.end() == range.offset) {
      remove_free(neighbour);
      range = {neighbour.offset, neighbour.bytes + range.bytes};
    }
  }
  add_free(range);
  return range;
}

std::map<std::uint64_t, RangeAllocator::Block>::iterator RangeAllocator::block_around(
    std::uint64_t offset) {
  auto found = blocks_.upper_bound(offset);
  if (found == blocks_.begin()) {
    return blocks_.end();
  }
  --found;
  return offset < found->first + found->second.bytes ? found : blocks_.end();
}

std::optional<std::uint64_t> RangeAllocator::pin(std::uint64_t offset) {
  const auto found = block_around(offset);
  if (found == blocks_.end()) {
    return std::nullopt;
  }
  ++found->second.pins;
  return found->first;
}

std::optional<ByteRange> RangeAllocator::unpin(std::uint64_t start) {
  const auto found = blocks_.find(start);
  if (found == blocks_.end() || --found->second.pins > 0 || !found->second.is_freed) {
    return std::nullopt;
  }
  return free(start);
}

bool RangeAllocator::quarantine(std::uint64_t offset) {
  const auto found = block_around(offset);
  if (found == blocks_.end()) {
    return false;
  }
  if (!found->second.is_quarantined) {
    found->second.is_quarantined = true;
    quarantined_bytes_ += found->second.bytes;
  }
  return true;
}

std::uint64_t RangeAllocator::largest_free_bytes() const {
  return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void RangeAllocator::add_free(const ByteRange& range) {
  free_bytes_[range.offset] = range.bytes;
  free_by_size_.insert({range.bytes, range.offset});
}

void RangeAllocator::remove_free(const ByteRange& range) {
  free_bytes_.erase(range.offset);
  free_by_size_.erase({range.bytes, range.offset});
}

}  // namespace horon
