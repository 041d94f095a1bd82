// How all ranks get a connection to rank 0, whatever hosts they are on. See Note [Meeting] in
// greeting.h.
#pragma once

#include <string>
#include <vector>

#include "core/store.h"
#include "cross/greeting.h"

namespace horon {

// On rank 0: everybody else. On the others: rank 0. `interfaces` as in own_addresses; rank 0's
// count. `own_door` as in meet_everybody(). Blocks until all that are expected have come.
// Throws TimeoutError (naming who is missing), UsageError (no such interface), Error.
std::vector<RemotePeer> meet_coordinator(Store& store, int rank, int n_ranks,
                                         const std::string& interfaces, const WaitContext& context,
                                         const DoorKey& own_door = {});

}  // namespace horon
