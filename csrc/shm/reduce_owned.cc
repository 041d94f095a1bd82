// ShmTransport: reductions of large tensors.
//
// A tensor goes through the rings in pieces, and every rank owns one slice of each piece: all copy
// in what others own, each reduces what it owns, all copy out what others have reduced. The first
// piece is copied in before the arrival, which then is its wait. (Working on three pieces at a
// time, with one wait for each instead of two, was measured to be 20 % slower: more has to stay in
// the caches.)
//
// Note [Lines that go back and forth]
// What limits this is how many cache lines a core can wait for at once, so as few as can be travel.
// The owner of a slice stores the result where each input came from, taking the lines for writing
// as it reads them; whoever brought the input copies the result out of its own ring and puts its
// part of the next piece into the same lines, which by then are its own. So a line goes to the
// owner once and back once, where separate places for inputs and results would make it four ways.
// Two cores of a Xeon took 7.7 ms for 64 MiB so, and 9.6 with separate places
// (docs/performance.md). After the last step nobody looks into another rank's ring, so the next
// operation may use the place at once.

#include <algorithm>
#include <cstring>

#include "core/inline_collective.h"
#include "reduce/reduce.h"
#include "shm/from_the_end.h"
#include "shm/line_copies.h"
#include "shm/rank_slice.h"
#include "shm/shm_transport.h"

namespace horon {
namespace {

// See Note [From the end].
constexpr std::uint64_t kStretchPieces = 4;

// With two ranks four times so much, two tensors and two rings, should stay in a private cache.
constexpr std::size_t kMostSliceBytes = std::size_t{128} * 1024;

// Reduced at a time where no lines are asked for. Two ranks' blocks stay in the first-level cache.
constexpr std::size_t kReturnBlockBytes = 4096;

// Reduces into `to` and stores the result in `also_to` as well, whose lines a peer has written; in
// blocks that stay in the first-level cache.
void reduce_and_return(std::byte* to, InlineVector<std::byte*, 16> also_to,
                       InlineVector<const void*, 16> sources, std::uint64_t count,
                       const Request& request, const double* factors, bool is_streaming) {
  const bool asks_ahead = !is_streaming && results_ask_ahead();
  const std::uint64_t block =
      (asks_ahead ? kAheadBytes : kReturnBlockBytes) / request.element_bytes;
  for (std::uint64_t done = 0; done < count; done += block) {
    const std::uint64_t part = std::min(block, count - done);
    const std::size_t bytes = part * request.element_bytes;
    const std::uint64_t next = std::min(block, count - done - part);
    if (asks_ahead) {
      for (std::byte* target : also_to) {
        prefetch_for_write(target + bytes, next * request.element_bytes);
      }
    }
    const auto n_sources = static_cast<int>(sources.size());
    std::byte* const also = is_streaming || also_to.empty() ? nullptr : also_to[0];
    reduce_to_both(to, also, sources.data(), n_sources, part, request.dtype, request.op, factors);
    for (std::size_t i = also != nullptr ? 1 : 0; i < also_to.size(); ++i) {
      is_streaming ? copy_streaming(also_to[i], to, bytes)
                   : (void)std::memcpy(also_to[i], to, bytes);
    }
    for (std::byte*& target : also_to) {
      target += bytes;
    }
    for (const void*& source : sources) {
      source = static_cast<const std::byte*>(source) + bytes;
    }
    to += bytes;
  }
}

}  // namespace

// One tensor on its way through the buffers. Pieces are numbered from 0 in the order of their
// turns.
class ShmTransport::OwnedSlices {
 public:
  OwnedSlices(ShmTransport& transport, const Request& request)
      : transport_(transport),
        request_(request),
        rank_(transport.rank_),
        n_ranks_(transport.n_ranks_),
        element_(request.element_bytes),
        piece_elements_(std::min(transport.ring_.most_bytes() / static_cast<std::size_t>(n_ranks_),
                                 kMostSliceBytes) /
                        kCacheLineBytes * kCacheLineBytes / element_ *
                        static_cast<std::uint64_t>(n_ranks_)),
        is_backward_(goes_from_the_end(request.count * element_, n_ranks_)),
        region_bytes_(most_slice_bytes()) {}

  std::uint64_t n_pieces() const {
    return (request_.count + piece_elements_ - 1) / piece_elements_;
  }

  // In every rank's ring: a region for each rank's slice. All pieces use the same place.
  std::size_t bytes() const { return region_bytes_ * static_cast<std::size_t>(n_ranks_); }

  // What others own of a piece, into this rank's ring.
  void copy_in(std::uint64_t piece, std::size_t place) const {
    for (int offset = 1; offset < n_ranks_; ++offset) {
      copy_in_slice(piece, place, (rank_ + offset) % n_ranks_);
    }
  }

  // What this rank owns of a piece; the result goes back to whoever brought an input and wants it.
  void reduce_own(std::uint64_t piece, std::size_t place, const double* factors) const {
    std::size_t done = 0;
    visit_slice(piece, rank_, [&](const std::byte* input, std::byte* output, std::size_t bytes) {
      InlineVector<const void*, 16> sources;
      InlineVector<std::byte*, 16> returned;
      for (int peer = 0; peer < n_ranks_; ++peer) {
        std::byte* brought = region(place, peer, rank_) + done;
        sources.push_back(peer == rank_ ? input : brought);
        if (peer != rank_ && wants_result(peer)) {
          returned.push_back(brought);
        }
      }
      const std::uint64_t elements = bytes / element_;
      if (wants_result(rank_)) {
        reduce_and_return(output, returned, sources, elements, request_, factors,
                          transport_.store_.is_streaming());
      } else {  // the root alone
        reduce(returned[0], sources.data(), n_ranks_, elements, request_.dtype, request_.op,
               factors);
      }
      done += bytes;
    });
  }

  // What others have reduced of a piece, and what they own of the next one in its place.
  void copy_out(std::uint64_t piece, std::size_t place, bool has_next) const {
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      if (request_.pieces == nullptr) {
        swap_slice(piece, place, owner, has_next);
        continue;
      }
      if (wants_result(rank_)) {
        copy_out_slice(piece, place, owner);
      }
      if (has_next) {
        copy_in_slice(piece + 1, place, owner);
      }
    }
  }

 private:
  void copy_in_slice(std::uint64_t piece, std::size_t place, int owner) const {
    std::byte* to = region(place, rank_, owner);
    visit_slice(piece, owner, [&](const std::byte* input, std::byte*, std::size_t bytes) {
      transport_.store_.copy(to, input, bytes);
      to += bytes;
    });
  }

  void copy_out_slice(std::uint64_t piece, std::size_t place, int owner) const {
    const std::byte* result = region(place, rank_, owner);
    visit_slice(piece, owner, [&](const std::byte*, std::byte* output, std::size_t bytes) {
      copy_lines(output, result, bytes);
      result += bytes;
    });
  }

  // Both, for a tensor that lies in one piece of memory.
  void swap_slice(std::uint64_t piece, std::size_t place, int owner, bool has_next) const {
    const bool has_result = wants_result(rank_);
    std::byte* to = has_result ? request_.outputs[0].data + first_byte(piece, owner) : nullptr;
    const std::byte* from =
        has_next ? request_.inputs[0].data + first_byte(piece + 1, owner) : nullptr;
    transport_.store_.swap(to, has_result ? slice_bytes(piece, owner) : 0,
                           region(place, rank_, owner), from,
                           has_next ? slice_bytes(piece + 1, owner) : 0);
  }

  // visit_tensor() for what `owner` owns of a piece.
  template <typename Visit>
  void visit_slice(std::uint64_t piece, int owner, const Visit& visit) const {
    visit_tensor(request_, first_byte(piece, owner), slice_bytes(piece, owner), visit);
  }
  // Its first element.
  std::uint64_t start_of(std::uint64_t piece) const {
    return (is_backward_ ? from_the_end(piece, n_pieces(), kStretchPieces) : piece) *
           piece_elements_;
  }
  Slice slice(std::uint64_t piece, int owner) const {
    const std::uint64_t count = std::min(piece_elements_, request_.count - start_of(piece));
    return slice_of(count, element_, owner, n_ranks_);
  }
  std::size_t first_byte(std::uint64_t piece, int owner) const {
    return (start_of(piece) + slice(piece, owner).begin) * element_;
  }
  std::size_t most_slice_bytes() const {
    const Slice first = slice_of(std::min(piece_elements_, request_.count), element_, 0, n_ranks_);
    return (first.end - first.begin) * element_;
  }
  std::size_t slice_bytes(std::uint64_t piece, int owner) const {
    const Slice slice = this->slice(piece, owner);
    return (slice.end - slice.begin) * element_;
  }
  bool wants_result(int rank) const {
    return pattern(request_.kind) == Pattern::kReduceToAll || rank == request_.root;
  }
  std::byte* region(std::size_t place, int writer, int owner) const {
    return transport_.segment_->data(writer) + place +
           static_cast<std::size_t>(owner) * region_bytes_;
  }

  ShmTransport& transport_;
  const Request& request_;
  const int rank_;
  const int n_ranks_;
  const std::size_t element_;
  const std::uint64_t piece_elements_;
  const bool is_backward_;
  const std::size_t region_bytes_;
};

void ShmTransport::copy_in_first_slices(const Request& request) {
  const OwnedSlices slices(*this, request);
  slices.copy_in(0, ring_.next(slices.bytes()));
}

void ShmTransport::reduce_owned(const Request& request, bool is_first_copied,
                                const WaitContext& context) {
  const OwnedSlices slices(*this, request);
  const auto factors = factors_of(headers());
  const std::size_t place = ring_.take(slices.bytes());
  if (!is_first_copied) {
    slices.copy_in(0, place);
    step(context);
  }
  for (std::uint64_t piece = 0; piece < slices.n_pieces(); ++piece) {
    const bool has_next = piece + 1 < slices.n_pieces();
    slices.reduce_own(piece, place, factors.data());
    step(context);
    slices.copy_out(piece, place, has_next);
    if (has_next) {
      step(context);
    }
  }
  ring_.give_back(place);
}

}  // namespace horon
