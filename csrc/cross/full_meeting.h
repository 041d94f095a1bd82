// How each two ranks of a group get a connection, whatever hosts they are on.
#pragma once

#include <string>
#include <vector>

#include "cross/coordinator_meeting.h"

namespace horon {

// A connection to everybody else, in rank order. `numbers`: what messages call the ranks; by rank.
// Rank by rank each meets those after it as a coordinator. Blocks until all have come. Throws as
// meet_coordinator().
std::vector<RemotePeer> meet_everybody(Store& store, int rank, const std::vector<int>& numbers,
                                       const std::string& interfaces, const WaitContext& context);

}  // namespace horon
