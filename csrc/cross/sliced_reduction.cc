#include "cross/sliced_reduction.h"

#include <algorithm>
#include <vector>

#include "cross/host_layout.h"

namespace horon {

void reduce_in_slices(ByteTransport& bytes, int rank, int n_ranks, const SlicedReduction& reduction,
                      const std::byte* input, std::byte* output, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks);
  const auto slice_of = [&](std::size_t each) { return part_of(reduction.count, each, n).size(); };
  const std::uint64_t own = slice_of(static_cast<std::size_t>(rank));
  std::vector<std::uint64_t> send_bytes(n);
  for (std::size_t each = 0; each < n; ++each) {
    send_bytes[each] = slice_of(each) * reduction.brought_bytes;
  }
  const std::uint64_t own_bytes = own * reduction.brought_bytes;
  std::vector<std::byte> contributions(own_bytes * n);
  bytes.all_to_all(input, send_bytes, contributions.data(),
                   std::vector<std::uint64_t>(n, own_bytes), context);
  std::vector<const void*> sources(n);
  for (std::size_t each = 0; each < n; ++each) {
    sources[each] = contributions.data() + each * own_bytes;
  }
  std::vector<std::byte> reduced(own * reduction.result_bytes);
  reduction.fold(reduced.data(), sources.data(), own);
  std::vector<std::byte> copies;
  std::vector<std::uint64_t> copy_bytes(n);
  std::vector<std::uint64_t> receive_bytes(n);
  const bool wants_result = reduction.root < 0 || rank == reduction.root;
  for (std::size_t each = 0; each < n; ++each) {
    if (reduction.root < 0 || static_cast<int>(each) == reduction.root) {
      copy_bytes[each] = reduced.size();
      copies.insert(copies.end(), reduced.begin(), reduced.end());
    }
    receive_bytes[each] = wants_result ? slice_of(each) * reduction.result_bytes : 0;
  }
  bytes.all_to_all(copies.data(), copy_bytes, wants_result ? output : nullptr, receive_bytes,
                   context);
}

}  // namespace horon
