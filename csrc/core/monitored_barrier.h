// The texts and deadlines of monitored_barrier, the debugging barrier in which rank 0 tells who is
// missing. The texts are those of ProcessGroupGloo, which tools and tests look for. All pure.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace horon {

// Rank 0 gives up first, so that the others hear its verdict.
inline constexpr std::chrono::seconds kGraceForRankZero{5};
std::chrono::milliseconds monitored_barrier_timeout(std::chrono::milliseconds timeout, int rank);

// What rank 0 throws when `missing` ranks had not come in time.
std::string monitored_barrier_timeout_text(const std::vector<int>& missing, bool all_ranks,
                                           std::chrono::milliseconds timeout);

// What the other ranks throw when rank 0 did not let them pass.
std::string monitored_barrier_refused_text(int rank, const std::string& reason);

}  // namespace horon
