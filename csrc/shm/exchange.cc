// ShmTransport: collectives that move bytes without reducing them.

#include <algorithm>
#include <cstring>

#include "core/published_stream.h"
#include "shm/line_copies.h"
#include "shm/shm_transport.h"

namespace horon {

// What this rank gives to itself needs no other rank.
void ShmTransport::copy_own_part(const Request& request) const {
  const ConstSpan& from = request.inputs[static_cast<std::size_t>(rank_)];
  const Span& to = request.outputs[static_cast<std::size_t>(rank_)];
  if (to.bytes == 0 || to.data == from.data) {
    return;
  }
  const bool are_apart = to.data + to.bytes <= from.data || from.data + to.bytes <= to.data;
  are_apart ? copy_lines(to.data, from.data, to.bytes)
            : (void)std::memmove(to.data, from.data, to.bytes);
}

// The same for [begin, begin + bytes) of it, after that has been copied in for the others: where
// all get the same it is still in the cache. What differs is copied whole, beside the first bytes.
void ShmTransport::copy_own_part(const Request& request, std::uint64_t begin,
                                 std::size_t bytes) const {
  if (!has_shared_input(request.kind)) {
    if (begin == 0) {
      copy_own_part(request);
    }
    return;
  }
  const ConstSpan& from = request.inputs[static_cast<std::size_t>(rank_)];
  const Span& to = request.outputs[static_cast<std::size_t>(rank_)];
  if (to.bytes > begin && to.data != from.data) {
    copy_lines(to.data + begin, from.data + begin,
               std::min<std::uint64_t>(bytes, to.bytes - begin));
  }
}

void ShmTransport::exchange(const Request& request, const WaitContext& context) {
  if (goes_both_ways(request.kind, n_ranks_)) {
    swap_with_peers(request, context);
    return;
  }
  const std::uint64_t piece_bytes = ring_.most_bytes();
  std::uint64_t longest = 0;
  for (const HeaderView& view : headers()) {
    longest = std::max(longest, view.header->published_bytes);
  }
  const PerRank<ConstSpan> pieces = stream_pieces(request, rank_, n_ranks_);
  for (std::uint64_t begin = 0; begin < longest; begin += piece_bytes) {
    const std::size_t place = ring_.take(std::min(piece_bytes, longest - begin));
    copy_from_stream(pieces, begin, piece_bytes, segment_->data(rank_) + place,
                     [this](std::byte* to, const std::byte* from, std::size_t bytes) {
                       store_.copy(to, from, bytes);
                     });
    board_.finish_step();
    copy_own_part(request, begin, piece_bytes);  // while the others get here
    board_.await_all(context);
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int source = (rank_ + n_ranks_ - offset) % n_ranks_;
      const StreamRange range = range_for(headers(), source, rank_);
      const std::uint64_t from = std::max(range.offset, begin);
      const std::uint64_t to = std::min(range.offset + range.bytes, begin + piece_bytes);
      if (from < to) {
        copy_lines(request.outputs[static_cast<std::size_t>(source)].data + (from - range.offset),
                   segment_->data(source) + place + (from - begin), to - from);
      }
    }
  }
}

}  // namespace horon
