// How all ranks get a connection to rank 0, whatever hosts they are on.
//
// Note [Meeting]
// Rank 0 listens, and puts its addresses, the port and a nonce into the store. The others try all
// addresses at once and greet whoever answers first with the nonce: behind an address that exists
// on every host (a bridge of containers) somebody else may listen. Rank 0 refuses a greeting
// without the nonce, answers one that has it, and counts a rank when that has read the answer.
#pragma once

#include <string>
#include <vector>

#include "core/store.h"
#include "core/unique_fd.h"
#include "core/wait_context.h"

namespace horon {

struct RemotePeer {
  int rank = 0;
  int number = 0;           // what messages call it
  std::string description;  // "rank 1 (pid 123 on host-b)"
  UniqueFd socket;          // connected; does not block
};

// On rank 0: everybody else. On the others: rank 0. `interfaces` as in own_addresses; rank 0's
// count. Blocks until all that are expected have come.
// `numbers`: what messages call the ranks, by rank; empty: as they are.
// Throws TimeoutError (naming who is missing), UsageError (no such interface), Error.
std::vector<RemotePeer> meet_coordinator(Store& store, int rank, int n_ranks,
                                         const std::string& interfaces, const WaitContext& context,
                                         const std::vector<int>& numbers = {});

}  // namespace horon
