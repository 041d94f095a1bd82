#include "shm/peers.h"

#include "core/error.h"

namespace horon {

std::string Peers::describe(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  const bool renamed = index < global_ranks.size() && global_ranks[index] != peer;
  return concat("rank ", peer,
                renamed ? concat(" (global rank ", global_ranks[index], ", pid ") : " (pid ",
                peers[index].pid, ")");
}

}  // namespace horon
