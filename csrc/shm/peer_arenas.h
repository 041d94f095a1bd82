// The arenas of other processes on this host, each mapped once however many groups it belongs to.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "shm/arena.h"

namespace horon {

// A peer's arena in this process's memory; unmapped when destroyed, and not there in a forked
// child.
class PeerArena {
 public:
  // Checks size and seals. Throws Error.
  PeerArena(int file, std::size_t bytes);
  ~PeerArena();
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  std::byte* data() const { return mapping_.data(); }
  std::size_t bytes() const { return mapping_.bytes(); }

 private:
  const std::uint32_t fork_generation_;
  Mapping mapping_;
};

// Thread safety: all methods.
class PeerArenas {
 public:
  // The mapping of that arena, made now if there is none. Throws Error.
  std::shared_ptr<PeerArena> map(const ArenaId& id, int file, std::size_t bytes);

 private:
  std::mutex mutex_;
  std::map<ArenaId, std::weak_ptr<PeerArena>> arenas_;  // guarded by mutex_
};

}  // namespace horon
