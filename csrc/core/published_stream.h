// What each rank publishes for the others, as one stream of bytes, and who reads which part of it.
//
// Note [Published stream]
// A rank publishes the data of its destinations one after another, starting with its right
// neighbour: rank r sends to r+1, r+2, ... r-1. When streams are read chunk by chunk, every reader
// is then busy with a different writer at any time. Data that is the same for all is published
// once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "core/header.h"
#include "core/request.h"

namespace horon {

// The part of a rank's stream that one reader wants, in bytes.
struct StreamRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Pure. Length of the stream that `rank` publishes.
std::uint64_t published_bytes(const Request& request, int rank, int n_ranks);

// Pure. Length of the longest stream of all ranks, where this rank's request alone tells it. Ranks
// whose requests fit together give the same answer.
std::optional<std::uint64_t> longest_stream(const Request& request, int n_ranks);

// Pure. The part of `source`'s stream that is for `destination` (source != destination).
StreamRange range_for(const std::vector<HeaderView>& headers, int source, int destination);

// The pieces of this rank's own stream, in order. Views into request.inputs.
PerRank<ConstSpan> stream_pieces(const Request& request, int rank, int n_ranks);

// Copies bytes [offset, offset + bytes) of the stream made of `pieces` to `to`; returns how many
// there were (fewer at the end of the stream). `copy(to, from, bytes)` copies one stretch.
template <typename Copy>
std::size_t copy_from_stream(const PerRank<ConstSpan>& pieces, std::uint64_t offset,
                             std::size_t bytes, std::byte* to, const Copy& copy) {
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
    copy(to + copied, piece.data + offset, part);
    copied += part;
    offset = 0;
  }
  return copied;
}

inline std::size_t copy_from_stream(const PerRank<ConstSpan>& pieces, std::uint64_t offset,
                                    std::size_t bytes, std::byte* to) {
  return copy_from_stream(
      pieces, offset, bytes, to,
      [](std::byte* to, const std::byte* from, std::size_t n) { std::memcpy(to, from, n); });
}

}  // namespace horon
