#include "cross/host_layout.h"

#include <algorithm>

namespace horon {

std::size_t HostLayout::index_of(int rank) const {
  const std::vector<int>& ranks = hosts[host_of[static_cast<std::size_t>(rank)]];
  return static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

HostLayout lay_out(const std::vector<int>& host_numbers, int rank) {
  HostLayout layout;
  std::vector<int> numbers;  // by host
  for (std::size_t each = 0; each < host_numbers.size(); ++each) {
    const auto found = std::find(numbers.begin(), numbers.end(), host_numbers[each]);
    const auto host = static_cast<std::size_t>(found - numbers.begin());
    if (found == numbers.end()) {
      numbers.push_back(host_numbers[each]);
      layout.hosts.emplace_back();
    }
    layout.hosts[host].push_back(static_cast<int>(each));
    layout.host_of.push_back(host);
  }
  layout.own_host = layout.host_of[static_cast<std::size_t>(rank)];
  layout.own_index = layout.index_of(rank);
  layout.n_columns = layout.hosts[0].size();
  for (const std::vector<int>& ranks : layout.hosts) {
    layout.n_columns = std::min(layout.n_columns, ranks.size());
  }
  return layout;
}

bool has_neighbours(const HostLayout& layout) {
  return layout.n_hosts() > 1 && layout.n_hosts() < layout.host_of.size();
}

}  // namespace horon
