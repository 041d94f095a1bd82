// Which ranks of a group share memory, and who of them talks to other hosts. Pure.
//
// Note [Columns]
// The ranks of a host are counted in the order of their ranks: its first, its second, and so on. As
// many as the smallest host has are columns: column c is the c-th rank of every host. What a host
// has for others is cut into as many parts, and each column carries one of them over the network,
// so that all of a host's ranks, or as many as can be, work at it at the same time. Ranks beyond
// the columns leave that to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace horon {

// Elements, or bytes, [begin, end).
struct Part {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
};

// One of `n_parts` nearly equal parts of so many.
inline Part part_of(std::uint64_t count, std::size_t part, std::size_t n_parts) {
  const std::uint64_t each = count / n_parts;
  const std::uint64_t longer = count % n_parts;  // the first ones have one more
  const auto begin_of = [&](std::uint64_t i) { return i * each + (i < longer ? i : longer); };
  return {begin_of(part), begin_of(part + 1)};
}

struct HostLayout {
  std::vector<std::vector<int>> hosts;  // the ranks of each, in order; by first rank
  std::vector<std::size_t> host_of;     // by rank, an index into `hosts`
  std::size_t own_host = 0;
  std::size_t own_index = 0;  // among the ranks of the own host
  std::size_t n_columns = 1;

  std::size_t n_hosts() const { return hosts.size(); }
  const std::vector<int>& neighbours() const { return hosts[own_host]; }  // this rank included
  int own_rank() const { return neighbours()[own_index]; }
  bool is_in_column() const { return own_index < n_columns; }
  bool is_neighbour(int rank) const { return host_of[static_cast<std::size_t>(rank)] == own_host; }
  // Where `rank` stands among the ranks of its host.
  std::size_t index_of(int rank) const;
};

// `host_numbers`: by rank; the same for ranks of one host.
HostLayout lay_out(const std::vector<int>& host_numbers, int rank);

// Whether there is more than one host, and one of them has more than one rank.
bool has_neighbours(const HostLayout& layout);

}  // namespace horon
