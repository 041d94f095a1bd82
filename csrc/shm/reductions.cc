// ShmTransport: reduce-scatter.

#include <algorithm>

#include "core/inline_collective.h"
#include "reduce/reduce.h"
#include "shm/shm_transport.h"

namespace horon {
namespace {

// A buffer is divided into one region per rank; regions start on cache lines.
std::size_t region_bytes(std::size_t buffer_bytes, int n_ranks) {
  return buffer_bytes / static_cast<std::size_t>(n_ranks) / kCacheLineBytes * kCacheLineBytes;
}

}  // namespace

void ShmTransport::reduce_scatter(const Request& request, const WaitContext& context) {
  const std::size_t most = region_bytes(ring_.most_bytes(), n_ranks_);
  const PerRank<double> factors = factors_of(headers());
  std::uint64_t longest = 0;
  for (const ConstSpan& input : request.inputs) {
    longest = std::max<std::uint64_t>(longest, input.bytes);
  }
  // Room for each rank's part of a round; what is left may be less than there could be.
  const std::size_t region = std::min<std::uint64_t>(
      most, (longest + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes);
  const auto part_at = [&](std::uint64_t begin, std::uint64_t bytes) {
    return bytes > begin ? std::min<std::uint64_t>(region, bytes - begin) : 0;
  };
  for (std::uint64_t begin = 0; begin < longest; begin += most) {
    const std::size_t place = ring_.take(region * static_cast<std::size_t>(n_ranks_));
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      const ConstSpan& input = request.inputs[static_cast<std::size_t>(owner)];
      const std::uint64_t part = part_at(begin, input.bytes);
      if (part > 0) {
        store_.copy(segment_->data(rank_) + place + static_cast<std::size_t>(owner) * region,
                    input.data + begin, part);
      }
    }
    step(context);
    const std::uint64_t own_part = part_at(begin, request.outputs[0].bytes);
    if (own_part > 0) {
      InlineVector<const void*, 16> sources;
      for (int source = 0; source < n_ranks_; ++source) {
        sources.push_back(source == rank_
                              ? request.inputs[static_cast<std::size_t>(rank_)].data + begin
                              : segment_->data(source) + place +
                                    static_cast<std::size_t>(rank_) * region);
      }
      reduce(request.outputs[0].data + begin, sources.data(), n_ranks_,
             own_part / request.element_bytes, request.dtype, request.op, factors.data());
    }
  }
}

}  // namespace horon
