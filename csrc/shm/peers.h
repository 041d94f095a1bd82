// Who the other ranks of a group on this host are.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "shm/liveness.h"

namespace horon {

struct Peer {
  pid_t pid = 0;         // in the peer's own namespace; for messages only
  UniqueFd liveness_fd;  // see has_ended
};

struct Peers {
  int rank = 0;
  std::vector<Peer> peers;        // by rank, this one included
  std::vector<int> global_ranks;  // by rank in the group; for messages
  // Where these are some of a group's ranks, which; by rank; for messages. Empty: all.
  std::vector<int> numbers;
  bool is_crowded = false;       // more ranks than cores; every rank says the same
  bool claims = false;           // see Options::claiming; every rank says the same
  bool has_spare_cores = false;  // one for a second thread of every rank; every rank says the same
  bool may_move = true;          // see core_spread.h
  // How long a caller's thread that waits may linger; see Note [Lingering] in wait_policy.h.
  std::chrono::microseconds linger_time{0};

  // Whether ranks that come to an operation together had better carry it out where they are: there
  // is a core for each, and no second one for a background thread. Every rank says the same.
  bool may_meet() const { return !is_crowded && !has_spare_cores; }

  int n_ranks() const { return static_cast<int>(peers.size()); }
  // What messages call a rank.
  int number(int peer) const {
    const auto index = static_cast<std::size_t>(peer);
    return index < numbers.size() ? numbers[index] : peer;
  }
  std::vector<int> numbers_of(const std::vector<int>& ranks) const;
  // As name_ranks().
  std::string name(const std::vector<int>& ranks) const;
  // "rank 1 (pid 123)", with the global rank where it differs.
  std::string describe(int peer) const;
};

}  // namespace horon
