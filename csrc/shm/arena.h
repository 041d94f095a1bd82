// Memory of this process that its local peers can see: tensors that live here are reduced in place.
//
// Note [Arena]
// One file (a memfd) of the budget's size, mapped once. The budget is only address space: pages are
// reserved in chunks as allocations reach them, after a look at what the system has left, and given
// back to the system when much of the arena is free. Peers map the whole file when a group is made
// (PeerArenas), so that nothing has to be exchanged when a tensor is allocated: an offset in the
// header of an operation is all that they need. Ranks allocate independently of each other.
//
// Note [Quarantine]
// When an operation on arena memory fails, another rank may still be about to store into it (a
// stopped process that wakes up an hour later). Such a block is never given out again.
//
// Note [Arena after fork]
// A forked child shares the mapping, and what it wrote would appear in its parent. So in the child
// the file is mapped again at the same place, privately: tensors stay readable there (they show
// what the parent has in them, until the child writes to that page), and nothing reaches the
// parent. Nothing is allocated or freed in a child.
//
// The budget counts what tensors take, in whole pages for large ones; what is reserved for them
// beyond that is less than a chunk at each end, and what is kept for the next ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "shm/mapping.h"
#include "shm/range_allocator.h"

namespace horon {

// Random; tells arenas apart on a host.
using ArenaId = std::array<std::uint64_t, 2>;

struct ArenaStatistics {
  std::uint64_t budget_bytes = 0;
  std::uint64_t used_bytes = 0;         // in blocks given out
  std::uint64_t reserved_bytes = 0;     // of the system's memory
  std::uint64_t quarantined_bytes = 0;  // part of used_bytes
};

// Thread safety: all methods, but for become_private.
class Arena {
 public:
  // Unit in which pages are reserved and given back.
  static constexpr std::uint64_t kChunkBytes = std::uint64_t{2} << 20;
  // How much reserved memory may be free before some of it goes back to the system, unless more
  // than that is in use: then as much as is in use.
  static constexpr std::uint64_t kKeptFreeBytes = std::uint64_t{256} << 20;

  // Reserves address space only. Throws Error.
  explicit Arena(std::size_t budget_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Aligned to 64 bytes, large blocks to pages. Contents are undefined. Requires: bytes > 0.
  // Throws Error when the budget is spent or the system is short of memory, and in a forked child.
  std::byte* allocate(std::size_t bytes);

  // Pointers that are not the start of a block are ignored, and everything is in a forked child.
  void free(std::byte* data) noexcept;

  // Whether [data, data + bytes) is arena memory. Two comparisons.
  bool contains(const void* data, std::size_t bytes) const {
    const auto offset =
        reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(mapping_.data());
    return offset < mapping_.bytes() && bytes <= mapping_.bytes() - offset;
  }
  // Requires: contains(data, 0).
  std::uint64_t offset_of(const void* data) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - mapping_.data());
  }

  // See Note [Quarantine]. `data` may point into a block; other pointers are ignored.
  void quarantine(const void* data);

  // While it is pinned, the block that `data` points into is not used again, whoever frees it or
  // moves its tensor elsewhere. Returns what unpin() wants; null when there is no such block.
  std::byte* pin(const void* data);
  void unpin(std::byte* block) noexcept;

  // In a forked child, before anything else: see Note [Arena after fork]. Only system calls.
  // Returns false when the system refused; the child then must not touch the arena.
  bool become_private() noexcept;

  const ArenaId& id() const { return id_; }
  int file() const { return file_.get(); }
  std::byte* data() const { return mapping_.data(); }
  std::size_t bytes() const { return mapping_.bytes(); }
  ArenaStatistics statistics() const;

 private:
  void reserve(const ByteRange& block);
  void trim(const ByteRange& freed) noexcept;
  [[noreturn]] void throw_budget_spent(std::size_t bytes) const;

  const ArenaId id_;
  const std::uint32_t fork_generation_;
  const UniqueFd file_;
  const Mapping mapping_;

  // Held while pages are reserved: who allocates at the same time would wait for memory anyway.
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  RangeAllocator ranges_;
  std::vector<bool> reserved_;  // by chunk
  std::uint64_t reserved_bytes_ = 0;
};

}  // namespace horon
