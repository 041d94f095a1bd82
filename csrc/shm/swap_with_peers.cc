// ShmTransport: collectives in which each two ranks give each other something.
//
// Note [Swapping]
// Each pair of ranks has two buffers, one in each one's ring. Both fill their own with the first
// part of what the other gets; after a step, each takes that out of the other's buffer and puts its
// next part in its place, line by line; after the next step they have changed buffers again. So
// every cache line that goes from one core to the other carries something, in both directions, and
// a core waits for three lines (input, buffer, output) instead of four. See Note [Lines that go
// back and forth] in reduce_owned.cc.

#include <algorithm>

#include "core/published_stream.h"
#include "shm/shm_transport.h"

namespace horon {
namespace {

// With two ranks, two buffers, input and output together should stay in a private cache.
constexpr std::size_t kMostBufferBytes = std::size_t{128} * 1024;

// The longest thing that any rank has for any other.
std::uint64_t longest_part(const std::vector<HeaderView>& headers) {
  const int n_ranks = static_cast<int>(headers.size());
  std::uint64_t longest = 0;
  for (int source = 0; source < n_ranks; ++source) {
    for (int destination = 0; destination < n_ranks; ++destination) {
      if (source != destination) {
        longest = std::max(longest, range_for(headers, source, destination).bytes);
      }
    }
  }
  return longest;
}

// What of `whole` lies in [begin, begin + most).
template <typename Bytes>
Bytes part_of(const Bytes& whole, std::uint64_t begin, std::size_t most) {
  if (whole.bytes <= begin) {
    return {};
  }
  return {whole.data + begin, std::min<std::size_t>(most, whole.bytes - begin)};
}

}  // namespace

void ShmTransport::swap_with_peers(const Request& request, const WaitContext& context) {
  const std::uint64_t longest = longest_part(headers());
  const auto n = static_cast<std::size_t>(n_ranks_);
  const std::size_t most = std::min<std::uint64_t>(
      std::min(ring_.most_bytes() / n, kMostBufferBytes) / kCacheLineBytes * kCacheLineBytes,
      (longest + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes);
  const std::size_t place = ring_.take(most * n);
  const auto buffer = [&](int owner, int peer) {
    return segment_->data(owner) + place + static_cast<std::size_t>(peer) * most;
  };
  const auto visit_peers = [&](const auto& visit) {
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int peer = (rank_ + offset) % n_ranks_;
      visit(peer, request.inputs[static_cast<std::size_t>(peer)],
            request.outputs[static_cast<std::size_t>(peer)]);
    }
  };
  visit_peers([&](int peer, const ConstSpan& input, const Span&) {
    const ConstSpan in = part_of(input, 0, most);
    store_.copy(buffer(rank_, peer), in.data, in.bytes);
  });
  board_.finish_step();
  copy_own_part(request, 0, most);  // while the others get here
  board_.await_all(context);
  bool is_own = false;
  for (std::uint64_t begin = 0; begin < longest; begin += most) {
    if (begin > 0) {
      step(context);
    }
    visit_peers([&](int peer, const ConstSpan& input, const Span& output) {
      std::byte* shared = is_own ? buffer(rank_, peer) : buffer(peer, rank_);
      const Span out = part_of(output, begin, most);
      const ConstSpan in = part_of(input, begin + most, most);
      store_.swap(out.data, out.bytes, shared, in.data, in.bytes);
    });
    copy_own_part(request, begin + most, most);
    is_own = !is_own;
  }
}

}  // namespace horon
