#include "cross/sliced_reduction.h"

#include <algorithm>
#include <vector>

#include "cross/host_layout.h"

namespace horon {

std::uint64_t piece_bytes_per_pair(std::size_t n_ranks) {
  constexpr std::uint64_t kMost = std::uint64_t{4} << 20;
  constexpr std::uint64_t kMostOfAll = std::uint64_t{32} << 20;
  constexpr std::uint64_t kLine = 64;
  return std::min(kMost, kMostOfAll / n_ranks / kLine * kLine);
}

std::vector<const void*> exchange_parts(ByteTransport& bytes, int rank, const SentSpans& parts,
                                        std::byte* received, const WaitContext& context) {
  const std::size_t own_bytes = parts[static_cast<std::size_t>(rank)].bytes;
  ReceivedSpans receive(parts.size());
  std::vector<const void*> all(parts.size());
  for (std::size_t each = 0; each < parts.size(); ++each) {
    if (static_cast<int>(each) == rank) {
      all[each] = parts[each].data;
      continue;
    }
    receive[each] = {received, own_bytes};
    all[each] = received;
    received += own_bytes;
  }
  bytes.exchange(parts, receive, context);
  return all;
}

void reduce_in_slices(ByteTransport& bytes, int rank, int n_ranks, const SlicedReduction& reduction,
                      const std::byte* input, std::byte* output, Scratch& scratch,
                      const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks);
  const auto own_index = static_cast<std::size_t>(rank);
  const auto slice_of = [&](std::size_t each) { return part_of(reduction.count, each, n); };
  const Part own = slice_of(own_index);
  const std::uint64_t own_bytes = own.size() * reduction.brought_bytes;
  const bool wants_result = reduction.root < 0 || rank == reduction.root;
  std::byte* const received =
      scratch.need(own_bytes * (n - 1) + (wants_result ? 0 : own.size() * reduction.result_bytes));
  SentSpans send(n);
  for (std::size_t each = 0; each < n; ++each) {
    const Part slice = slice_of(each);
    send[each] = {input + slice.begin * reduction.brought_bytes,
                  slice.size() * reduction.brought_bytes};
  }
  const auto sources = exchange_parts(bytes, rank, send, received, context);
  std::byte* const reduced =
      wants_result ? output + own.begin * reduction.result_bytes : received + own_bytes * (n - 1);
  reduction.fold(reduced, sources.data(), own.size());
  ReceivedSpans receive(n);
  for (std::size_t each = 0; each < n; ++each) {
    const Part slice = slice_of(each);
    const bool is_target = reduction.root < 0 || static_cast<int>(each) == reduction.root;
    send[each] = {reduced, is_target ? own.size() * reduction.result_bytes : 0};
    receive[each] = wants_result ? Span{output + slice.begin * reduction.result_bytes,
                                        slice.size() * reduction.result_bytes}
                                 : Span{};
  }
  bytes.exchange(send, receive, context);
}

}  // namespace horon
