#include "core/rank_list.h"

namespace horon {

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) {
      text += i + 1 == ranks.size() ? " and " : ", ";
    }
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string name_ranks(const std::vector<int>& ranks, const std::vector<int>& global_ranks) {
  return name_ranks(ranks, {}, global_ranks);
}

std::string name_ranks(const std::vector<int>& ranks, const std::vector<int>& numbers,
                       const std::vector<int>& global_ranks) {
  std::vector<int> called;
  std::vector<int> global;
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    called.push_back(index < numbers.size() ? numbers[index] : rank);
    global.push_back(index < global_ranks.size() ? global_ranks[index] : called.back());
  }
  return global == called ? name_ranks(called)
                          : name_ranks(called) + " (global " + name_ranks(global) + ')';
}

}  // namespace horon
