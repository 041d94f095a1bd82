// ShmTransport: reductions of large tensors where every rank has a core.
//
// A tensor goes through the rings in pieces, and every rank owns one slice of each piece: all copy
// in what others own, each reduces what it owns, all copy out what others have reduced. The first
// piece is copied in before the arrival, which then is its wait: what a rank may still be reading
// of the operation before lies elsewhere in the ring. (Working on three pieces at a time, with one
// wait for each instead of two, was measured to be 20 % slower: more has to stay in the caches.)

#include <algorithm>
#include <cstring>

#include "reduce/reduce.h"
#include "shm/copy_ahead.h"
#include "shm/rank_slice.h"
#include "shm/shm_transport.h"

namespace horon {
namespace {

// Reduces into `to` and leaves a copy in `also_to`, whose lines a peer has read; in blocks that
// stay in the first-level cache.
void reduce_twice(std::byte* to, std::byte* also_to, InlineVector<const void*, 16> sources,
                  std::uint64_t count, const Request& request, const double* factors,
                  bool is_streaming) {
  const std::uint64_t block = kAheadBytes / request.element_bytes;
  for (std::uint64_t done = 0; done < count; done += block) {
    const std::uint64_t part = std::min(block, count - done);
    if (!is_streaming) {
      const std::uint64_t next = std::min(block, count - done - part);
      prefetch_for_write(also_to + part * request.element_bytes, next * request.element_bytes);
    }
    reduce(to, sources.data(), static_cast<int>(sources.size()), part, request.dtype, request.op,
           factors);
    const std::size_t bytes = part * request.element_bytes;
    is_streaming ? copy_streaming(also_to, to, bytes) : (void)std::memcpy(also_to, to, bytes);
    to += bytes;
    also_to += bytes;
    for (const void*& source : sources) {
      source = static_cast<const std::byte*>(source) + bytes;
    }
  }
}

}  // namespace

// One tensor on its way through the buffers. Pieces are numbered from 0.
class ShmTransport::OwnedSlices {
 public:
  OwnedSlices(ShmTransport& transport, const Request& request)
      : transport_(transport),
        request_(request),
        rank_(transport.rank_),
        n_ranks_(transport.n_ranks_),
        element_(request.element_bytes),
        piece_elements_(transport.ring_.most_bytes() / static_cast<std::size_t>(n_ranks_) /
                        kCacheLineBytes * kCacheLineBytes / element_ *
                        static_cast<std::uint64_t>(n_ranks_)),
        wants_result_(pattern(request.kind) == Pattern::kReduceToAll || rank_ == request.root) {}

  std::uint64_t n_pieces() const {
    return (request_.count + piece_elements_ - 1) / piece_elements_;
  }

  // Of a piece, in every rank's ring: a region for each rank's slice.
  std::size_t piece_bytes(std::uint64_t piece) const {
    return region_bytes(piece) * static_cast<std::size_t>(n_ranks_);
  }

  // What others own of a piece, into this rank's ring.
  void copy_in(std::uint64_t piece, std::size_t place) const {
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      std::byte* to = region(piece, place, rank_, owner);
      visit_slice(piece, owner, [&](const std::byte* input, std::byte*, std::size_t bytes) {
        transport_.store_.copy(to, input, bytes);
        to += bytes;
      });
    }
  }

  void reduce_own(std::uint64_t piece, std::size_t place, const double* factors) const {
    std::size_t done = 0;
    visit_slice(piece, rank_, [&](const std::byte* input, std::byte* output, std::size_t bytes) {
      InlineVector<const void*, 16> sources;
      for (int source = 0; source < n_ranks_; ++source) {
        sources.push_back(source == rank_ ? input : region(piece, place, source, rank_) + done);
      }
      std::byte* result = region(piece, place, rank_, rank_) + done;
      const std::uint64_t elements = bytes / element_;
      if (wants_result_) {
        reduce_twice(output, result, sources, elements, request_, factors,
                     transport_.store_.is_streaming());
      } else {
        reduce(result, sources.data(), n_ranks_, elements, request_.dtype, request_.op, factors);
      }
      done += bytes;
    });
  }

  // What others have reduced of a piece.
  void copy_out(std::uint64_t piece, std::size_t place) const {
    if (!wants_result_) {
      return;
    }
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      const std::byte* result = region(piece, place, owner, owner);
      visit_slice(piece, owner, [&](const std::byte*, std::byte* output, std::size_t bytes) {
        copy_ahead(output, result, bytes);
        result += bytes;
      });
    }
  }

 private:
  // visit_tensor() for what `owner` owns of a piece.
  template <typename Visit>
  void visit_slice(std::uint64_t piece, int owner, const Visit& visit) const {
    const Slice slice = slice_of(count(piece), element_, owner, n_ranks_);
    visit_tensor(request_, first_byte(piece) + slice.begin * element_,
                 (slice.end - slice.begin) * element_, visit);
  }
  std::size_t first_byte(std::uint64_t piece) const { return piece * piece_elements_ * element_; }
  std::uint64_t count(std::uint64_t piece) const {
    return std::min(piece_elements_, request_.count - piece * piece_elements_);
  }
  std::size_t region_bytes(std::uint64_t piece) const {
    const Slice first = slice_of(count(piece), element_, 0, n_ranks_);  // none is larger
    return ((first.end - first.begin) * element_ + kCacheLineBytes - 1) / kCacheLineBytes *
           kCacheLineBytes;
  }
  std::byte* region(std::uint64_t piece, std::size_t place, int writer, int owner) const {
    return transport_.segment_->data(writer) + place +
           static_cast<std::size_t>(owner) * region_bytes(piece);
  }

  ShmTransport& transport_;
  const Request& request_;
  const int rank_;
  const int n_ranks_;
  const std::size_t element_;
  const std::uint64_t piece_elements_;
  const bool wants_result_;
};

void ShmTransport::copy_in_first_slices(const Request& request) {
  const OwnedSlices slices(*this, request);
  slices.copy_in(0, ring_.next(slices.piece_bytes(0)));
}

void ShmTransport::reduce_owned(const Request& request, bool is_first_copied,
                                const WaitContext& context) {
  const OwnedSlices slices(*this, request);
  const auto factors = this->factors();
  for (std::uint64_t piece = 0; piece < slices.n_pieces(); ++piece) {
    const std::size_t place = ring_.take(slices.piece_bytes(piece));
    if (piece > 0 || !is_first_copied) {
      slices.copy_in(piece, place);
      step(context);
    }
    slices.reduce_own(piece, place, factors.data());
    step(context);
    slices.copy_out(piece, place);
  }
}

}  // namespace horon
