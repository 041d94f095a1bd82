// The arenas of the ranks of one group, as one of its ranks sees them.
#pragma once

#include <memory>
#include <vector>

#include "shm/arena.h"

namespace horon {

// Thread safety: all methods; nothing changes after construction.
class GroupArenas {
 public:
  // One rank's arena in this process's memory. Empty: the rank has none.
  struct View {
    std::shared_ptr<const void> owner;  // keeps it mapped
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  // Not usable: this rank has not mapped the others' arenas.
  GroupArenas() = default;
  // `own` may be null. `views` are by rank, this one included.
  GroupArenas(std::shared_ptr<Arena> own, std::vector<View> views)
      : own_(std::move(own)), views_(std::move(views)) {}

  bool is_usable() const { return !views_.empty(); }
  // This process's arena; may be null.
  const std::shared_ptr<Arena>& own() const { return own_; }

  // Whether the memory lies in this process's arena, and peers can reach it.
  bool contains(const void* data, std::size_t bytes) const {
    return is_usable() && own_ && own_->contains(data, bytes);
  }
  // Requires: contains(data, 0).
  std::uint64_t offset_of(const void* data) const { return own_->offset_of(data); }

  // `bytes` bytes at `offset` of a rank's arena. Throws Error when that is not inside.
  std::byte* at(int rank, std::uint64_t offset, std::uint64_t bytes) const;

  // See Note [Quarantine]; other pointers than such into the own arena are ignored.
  void quarantine(const void* data) const {
    if (own_) {
      own_->quarantine(data);
    }
  }

 private:
  std::shared_ptr<Arena> own_;
  std::vector<View> views_;
};

}  // namespace horon
