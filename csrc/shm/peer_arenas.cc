#include "shm/peer_arenas.h"

#include <sys/mman.h>

#include <cerrno>

#include "core/error.h"
#include "core/fork_guard.h"

namespace horon {

PeerArena::PeerArena(int file, std::size_t bytes) : fork_generation_(fork_generation()) {
  check_shared_file(file, bytes);
  mapping_ = Mapping(file, bytes, Mapping::Pages::kLater);
  // A child has no business in other processes' memory.
  HORON_CHECK(::madvise(mapping_.data(), bytes, MADV_DONTFORK) == 0,
              system_error_text("madvise(MADV_DONTFORK)", errno));
#ifdef MADV_HUGEPAGE
  (void)::madvise(mapping_.data(), bytes, MADV_HUGEPAGE);  // see Arena
#endif
}

PeerArena::~PeerArena() {
  if (fork_generation_ != fork_generation()) {
    mapping_.release();  // something else may be at that address by now
  }
}

std::shared_ptr<PeerArena> PeerArenas::map(const ArenaId& id, int file, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<PeerArena>& known = arenas_[id];
  std::shared_ptr<PeerArena> arena = known.lock();
  if (!arena) {
    arena = std::make_shared<PeerArena>(file, bytes);
    known = arena;
    std::erase_if(arenas_, [](const auto& entry) { return entry.second.expired(); });
  }
  return arena;
}

}  // namespace horon
