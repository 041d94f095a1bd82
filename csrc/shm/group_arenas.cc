#include "shm/group_arenas.h"

#include "core/error.h"

namespace horon {

std::byte* GroupArenas::at(int rank, std::uint64_t offset, std::uint64_t bytes) const {
  const View& view = views_[static_cast<std::size_t>(rank)];
  HORON_CHECK(offset <= view.bytes && bytes <= view.bytes - offset, "arena: rank ", rank,
              " says that its data is at ", offset, " (", bytes, " bytes), and its arena has ",
              view.bytes, " bytes. This is a bug in horon.");
  return view.data + offset;
}

}  // namespace horon
