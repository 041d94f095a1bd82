#include "shm/peers.h"

#include "core/error.h"
#include "core/rank_list.h"

namespace horon {

std::vector<int> Peers::numbers_of(const std::vector<int>& ranks) const {
  std::vector<int> called;
  called.reserve(ranks.size());
  for (const int rank : ranks) {
    called.push_back(number(rank));
  }
  return called;
}

std::string Peers::name(const std::vector<int>& ranks) const {
  return name_ranks(ranks, numbers, global_ranks);
}

std::string Peers::describe(int peer) const {
  const auto index = static_cast<std::size_t>(peer);
  const int number = this->number(peer);
  const bool renamed = index < global_ranks.size() && global_ranks[index] != number;
  return concat("rank ", number,
                renamed ? concat(" (global rank ", global_ranks[index], ", pid ") : " (pid ",
                peers[index].pid, ")");
}

}  // namespace horon
