// ShmTransport: reductions of large tensors with more ranks than cores; see Note [Claiming].
//
// A piece of the tensor goes into each rank's ring whole, and the slices of the result take the
// place of rank 0's input.

#include <algorithm>

#include "reduce/reduce.h"
#include "shm/line_copies.h"
#include "shm/shm_transport.h"

namespace horon {

void ShmTransport::copy_in_piece(const Request& request, std::uint64_t first_byte,
                                 std::size_t bytes, std::size_t place) {
  std::byte* to = segment_->data(rank_) + place;
  visit_tensor(request, first_byte, bytes,
               [&](const std::byte* input, std::byte*, std::size_t part) {
                 store_.copy(to, input, part);
                 to += part;
               });
}

void ShmTransport::copy_in_first_piece(const Request& request) {
  const std::size_t bytes = std::min<std::size_t>(request.inputs[0].bytes, ring_.most_bytes());
  copy_in_piece(request, 0, bytes, ring_.next(bytes));
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
      copy_in_piece(request, begin * element, count * element, place);
      step(context);
    }
    claims_.share(count, element, context, [&](std::uint64_t first, std::uint64_t end) {
      InlineVector<const void*, 16> sources;
      for (int source = 0; source < n_ranks_; ++source) {
        sources.push_back(segment_->data(source) + place + first * element);
      }
      reduce(segment_->data(0) + place + first * element, sources.data(), n_ranks_, end - first,
             request.dtype, request.op, factors.data());
    });
    if (wants_result) {
      const std::byte* result = segment_->data(0) + place;
      visit_tensor(request, begin * element, count * element,
                   [&](const std::byte*, std::byte* output, std::size_t part) {
                     copy_lines(output, result, part);
                     result += part;
                   });
    }
  }
}

}  // namespace horon
