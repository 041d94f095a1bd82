#include "core/published_stream.h"

#include <algorithm>
#include <cstring>

namespace horon {

std::uint64_t published_bytes(const Request& request, int rank, int n_ranks) {
  std::uint64_t total = 0;
  for (const ConstSpan& piece : stream_pieces(request, rank, n_ranks)) {
    total += piece.bytes;
  }
  return total;
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

std::vector<ConstSpan> stream_pieces(const Request& request, int rank, int n_ranks) {
  std::vector<ConstSpan> pieces;
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

std::size_t copy_from_stream(const std::vector<ConstSpan>& pieces, std::uint64_t offset,
                             std::size_t bytes, std::byte* to) {
  std::size_t copied = 0;
  for (const ConstSpan& piece : pieces) {
    if (copied == bytes) {
      break;
    }
    if (offset >= piece.bytes) {
      offset -= piece.bytes;
      continue;
    }
    const std::size_t part = std::min<std::size_t>(piece.bytes - offset, bytes - copied);
    std::memcpy(to + copied, piece.data + offset, part);
    copied += part;
    offset = 0;
  }
  return copied;
}

}  // namespace horon
