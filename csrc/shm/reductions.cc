// ShmTransport: collectives that reduce.

#include <algorithm>
#include <cstring>

#include "core/published_stream.h"
#include "reduce/reduce.h"
#include "shm/shm_transport.h"

namespace horon {
namespace {

// A buffer is divided into one region per rank; regions start on cache lines.
std::size_t region_bytes(std::size_t buffer_bytes, int n_ranks) {
  return buffer_bytes / static_cast<std::size_t>(n_ranks) / kCacheLineBytes * kCacheLineBytes;
}

// Elements [begin, end) of a piece that one rank owns.
struct Slice {
  std::uint64_t begin;
  std::uint64_t end;
};

// Splits `count` elements over the ranks on cache-line boundaries. Pure.
Slice slice_of(std::uint64_t count, std::size_t element_bytes, int rank, int n_ranks) {
  const std::uint64_t line = kCacheLineBytes / element_bytes;
  const auto n = static_cast<std::uint64_t>(n_ranks);
  const std::uint64_t per_rank = ((count + n - 1) / n + line - 1) / line * line;
  const auto r = static_cast<std::uint64_t>(rank);
  return {std::min(count, r * per_rank), std::min(count, (r + 1) * per_rank)};
}

// Reduces into `to` and leaves a copy in `also_to`, in blocks that stay in the first-level cache.
void reduce_twice(std::byte* to, std::byte* also_to, std::vector<const void*> sources,
                  std::uint64_t count, const Request& request, const double* factors) {
  const std::uint64_t block = 8192 / request.element_bytes;
  for (std::uint64_t done = 0; done < count; done += block) {
    const std::uint64_t part = std::min(block, count - done);
    reduce(to, sources.data(), static_cast<int>(sources.size()), part, request.dtype, request.op,
           factors);
    const std::size_t bytes = part * request.element_bytes;
    std::memcpy(also_to, to, bytes);
    to += bytes;
    also_to += bytes;
    for (const void*& source : sources) {
      source = static_cast<const std::byte*>(source) + bytes;
    }
  }
}

}  // namespace

std::vector<double> ShmTransport::factors() const {
  std::vector<double> factors;
  if (headers_[0].header->op == ReduceOp::kPremulSum) {
    for (const HeaderView& view : headers_) {
      factors.push_back(view.header->factor);
    }
  }
  return factors;
}

void ShmTransport::reduce_inline(const Request& request) {
  if (request.kind == OpKind::kReduce && rank_ != request.root) {
    return;
  }
  std::vector<const void*> sources;
  for (const HeaderView& view : headers_) {
    sources.push_back(view.inline_data);
  }
  reduce(request.outputs[0].data, sources.data(), n_ranks_, request.count, request.dtype,
         request.op, factors().data());
}

void ShmTransport::reduce_pieces(const Request& request, const WaitContext& context) {
  const bool to_all = pattern(request.kind) == Pattern::kReduceToAll;
  const bool wants_result = to_all || rank_ == request.root;
  const std::size_t element = request.element_bytes;
  const std::size_t region = region_bytes(segment_->layout().buffer_bytes(), n_ranks_);
  const std::uint64_t piece_elements = region / element * static_cast<std::uint64_t>(n_ranks_);
  const std::vector<double> factors = this->factors();
  const auto region_of = [&](int writer, int owner) {
    return segment_->buffer(writer, parity_) + static_cast<std::size_t>(owner) * region;
  };
  for (std::uint64_t done = 0; done < request.count; done += piece_elements) {
    const std::uint64_t count = std::min(piece_elements, request.count - done);
    const std::byte* input = request.inputs[0].data + done * element;
    std::byte* output = wants_result ? request.outputs[0].data + done * element : nullptr;
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      const Slice slice = slice_of(count, element, owner, n_ranks_);
      std::memcpy(region_of(rank_, owner), input + slice.begin * element,
                  (slice.end - slice.begin) * element);
    }
    step(context);
    const Slice own = slice_of(count, element, rank_, n_ranks_);
    std::vector<const void*> sources;
    sources.reserve(headers_.size());
    for (int source = 0; source < n_ranks_; ++source) {
      sources.push_back(source == rank_ ? input + own.begin * element : region_of(source, rank_));
    }
    if (wants_result) {
      reduce_twice(output + own.begin * element, region_of(rank_, rank_), sources,
                   own.end - own.begin, request, factors.data());
    } else {
      reduce(region_of(rank_, rank_), sources.data(), n_ranks_, own.end - own.begin, request.dtype,
             request.op, factors.data());
    }
    step(context);
    for (int offset = 1; wants_result && offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      const Slice slice = slice_of(count, element, owner, n_ranks_);
      std::memcpy(output + slice.begin * element, region_of(owner, owner),
                  (slice.end - slice.begin) * element);
    }
    parity_ ^= 1;
  }
}

void ShmTransport::reduce_scatter_inline(const Request& request) {
  std::vector<const void*> sources;
  for (int source = 0; source < n_ranks_; ++source) {
    if (source == rank_) {
      sources.push_back(request.inputs[static_cast<std::size_t>(rank_)].data);
    } else {
      const StreamRange range = range_for(headers_, source, rank_);
      sources.push_back(headers_[static_cast<std::size_t>(source)].inline_data + range.offset);
    }
  }
  reduce(request.outputs[0].data, sources.data(), n_ranks_,
         request.outputs[0].bytes / request.element_bytes, request.dtype, request.op,
         factors().data());
}

void ShmTransport::reduce_scatter(const Request& request, const WaitContext& context) {
  const std::size_t region = region_bytes(segment_->layout().buffer_bytes(), n_ranks_);
  const std::vector<double> factors = this->factors();
  std::uint64_t longest = 0;
  for (const ConstSpan& input : request.inputs) {
    longest = std::max<std::uint64_t>(longest, input.bytes);
  }
  const auto part_at = [&](std::uint64_t begin, std::uint64_t bytes) {
    return bytes > begin ? std::min<std::uint64_t>(region, bytes - begin) : 0;
  };
  for (std::uint64_t begin = 0; begin < longest; begin += region) {
    for (int offset = 1; offset < n_ranks_; ++offset) {
      const int owner = (rank_ + offset) % n_ranks_;
      const ConstSpan& input = request.inputs[static_cast<std::size_t>(owner)];
      const std::uint64_t part = part_at(begin, input.bytes);
      if (part > 0) {
        std::memcpy(segment_->buffer(rank_, parity_) + static_cast<std::size_t>(owner) * region,
                    input.data + begin, part);
      }
    }
    step(context);
    const std::uint64_t own_part = part_at(begin, request.outputs[0].bytes);
    if (own_part > 0) {
      std::vector<const void*> sources;
      sources.reserve(headers_.size());
      for (int source = 0; source < n_ranks_; ++source) {
        sources.push_back(source == rank_
                              ? request.inputs[static_cast<std::size_t>(rank_)].data + begin
                              : segment_->buffer(source, parity_) +
                                    static_cast<std::size_t>(rank_) * region);
      }
      reduce(request.outputs[0].data + begin, sources.data(), n_ranks_,
             own_part / request.element_bytes, request.dtype, request.op, factors.data());
    }
    parity_ ^= 1;
  }
}

}  // namespace horon
