// ShmTransport: reductions of large tensors with more ranks than cores; see Note [Claiming].
//
// A piece of the tensor goes into each rank's ring whole, and the slices of the result take the
// place of rank 0's input.

#include <algorithm>
#include <cstring>

#include "reduce/reduce.h"
#include "shm/shm_transport.h"

namespace horon {
namespace {

// Small enough that two ranks find something to do, large enough that claiming costs nothing.
constexpr std::size_t kSliceBytes = std::size_t{32} * 1024;

// Elements of a slice, in whole cache lines, such that there are not too many. Pure.
std::uint64_t slice_elements(std::uint64_t count, std::size_t element_bytes) {
  const std::uint64_t line = kCacheLineBytes / element_bytes;
  const std::uint64_t least = (count + Claims::kMostSlices - 1) / Claims::kMostSlices;
  const std::uint64_t wanted = std::max<std::uint64_t>(kSliceBytes / element_bytes, least);
  return (wanted + line - 1) / line * line;
}

}  // namespace

void ShmTransport::copy_in_first_piece(const Request& request) {
  const std::size_t bytes = std::min<std::size_t>(request.inputs[0].bytes, ring_.most_bytes());
  store_.copy(segment_->data(rank_) + ring_.next(bytes), request.inputs[0].data, bytes);
}

void ShmTransport::reduce_claimed(const Request& request, bool is_first_copied,
                                  const WaitContext& context) {
  const std::size_t element = request.element_bytes;
  const std::uint64_t piece_elements = ring_.most_bytes() / element;
  const bool wants_result = pattern(request.kind) == Pattern::kReduceToAll || rank_ == request.root;
  const auto factors = this->factors();
  for (std::uint64_t begin = 0; begin < request.count; begin += piece_elements) {
    const std::uint64_t count = std::min(piece_elements, request.count - begin);
    const std::size_t place = ring_.take(count * element);
    if (begin > 0 || !is_first_copied) {
      store_.copy(segment_->data(rank_) + place, request.inputs[0].data + begin * element,
                  count * element);
      step(context);
    }
    const std::uint64_t slice = slice_elements(count, element);
    claims_.begin_round(static_cast<std::uint32_t>((count + slice - 1) / slice));
    while (const auto index = claims_.claim()) {
      const std::uint64_t first = *index * slice;
      InlineVector<const void*, 16> sources;
      for (int source = 0; source < n_ranks_; ++source) {
        sources.push_back(segment_->data(source) + place + first * element);
      }
      reduce(segment_->data(0) + place + first * element, sources.data(), n_ranks_,
             std::min(slice, count - first), request.dtype, request.op, factors.data());
      claims_.finish();
    }
    claims_.await_all(context);
    if (wants_result) {
      std::memcpy(request.outputs[0].data + begin * element, segment_->data(0) + place,
                  count * element);
    }
  }
}

}  // namespace horon
