// How messages name ranks.
#pragma once

#include <string>
#include <vector>

namespace horon {

// "rank 0", "ranks 1, 2 and 5".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace horon
