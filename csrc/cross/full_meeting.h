// How each two ranks of a group get connections, whatever hosts they are on.
#pragma once

#include <string>
#include <vector>

#include "core/store.h"
#include "cross/greeting.h"

namespace horon {

// `n_streams` connections to everybody else: by stream, in rank order. `numbers`: what messages
// call the ranks; by rank. Each rank listens, connects to those before it and then receives those
// after it; rank 0 gathers where all listen, so that each asks the store but once. Blocks until all
// have come. `own_door`: where others can ask this process what it is doing.
// Throws TimeoutError (naming who is missing), UsageError (no such interface), Error.
std::vector<std::vector<RemotePeer>> meet_everybody(Store& store, int rank,
                                                    const std::vector<int>& numbers, int n_streams,
                                                    const std::string& interfaces,
                                                    const WaitContext& context,
                                                    const DoorKey& own_door = {});

}  // namespace horon
