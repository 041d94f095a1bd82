#include "core/published_stream.h"

namespace horon {

std::uint64_t published_bytes(const Request& request, int rank, int n_ranks) {
  const Pattern moves = pattern(request.kind);
  if (moves == Pattern::kReduceToAll || moves == Pattern::kReduceToRoot) {
    return request.inputs[0].bytes;  // asked twice in each small all-reduce
  }
  std::uint64_t total = 0;
  for (const ConstSpan& piece : stream_pieces(request, rank, n_ranks)) {
    total += piece.bytes;
  }
  return total;
}

std::optional<std::uint64_t> longest_stream(const Request& request, int n_ranks) {
  switch (request.kind) {
    case OpKind::kBarrier:
      return 0;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kBroadcast:
    case OpKind::kAllGatherSingle:
      return request.count * request.element_bytes;
    case OpKind::kReduceScatterSingle:
      return published_bytes(request, 0, n_ranks);
    default:  // coalesced, or each rank has sizes of its own
      return std::nullopt;
  }
}

StreamRange range_for(const std::vector<HeaderView>& headers, int source, int destination) {
  const HeaderView& from = headers[static_cast<std::size_t>(source)];
  const std::uint64_t element_bytes = from.header->element_bytes;
  const std::uint64_t bytes = from.send_counts[destination] * element_bytes;
  if (has_shared_input(from.header->kind)) {
    return {0, bytes};
  }
  const int n_ranks = static_cast<int>(headers.size());
  std::uint64_t offset = 0;
  for (int peer = (source + 1) % n_ranks; peer != destination; peer = (peer + 1) % n_ranks) {
    offset += from.send_counts[peer] * element_bytes;
  }
  return {offset, bytes};
}

PerRank<ConstSpan> stream_pieces(const Request& request, int rank, int n_ranks) {
  PerRank<ConstSpan> pieces;
  switch (pattern(request.kind)) {
    case Pattern::kNone:
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot:
      pieces.push_back(request.inputs[0]);
      break;
    case Pattern::kReduceScatter:
    case Pattern::kExchange:
      for (int step = 1; step < n_ranks; ++step) {
        const auto destination = static_cast<std::size_t>((rank + step) % n_ranks);
        if (request.inputs[destination].bytes > 0) {
          pieces.push_back(request.inputs[destination]);
          if (has_shared_input(request.kind)) {
            break;
          }
        }
      }
      break;
  }
  return pieces;
}

}  // namespace horon
