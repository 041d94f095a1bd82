// How messages name ranks.
#pragma once

#include <string>
#include <vector>

namespace horon {

// "rank 0", "ranks 1, 2 and 5".
std::string name_ranks(const std::vector<int>& ranks);

// The same of ranks of a group, with what they are in the default group where that differs: "rank 1
// (global rank 2)". `global_ranks` is by rank; empty: nothing is known.
std::string name_ranks(const std::vector<int>& ranks, const std::vector<int>& global_ranks);

// The same of ranks that are called `numbers`, by rank; empty: as they are.
std::string name_ranks(const std::vector<int>& ranks, const std::vector<int>& numbers,
                       const std::vector<int>& global_ranks);

}  // namespace horon
