#include "cross/cross_transport.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/monitored_barrier.h"
#include "core/published_stream.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

// Per pair of ranks and round.
constexpr std::uint64_t kPieceBytes = std::uint64_t{4} << 20;

using Counts = std::vector<std::uint64_t>;

std::uint64_t part_at(std::uint64_t begin, std::uint64_t bytes) {
  return bytes > begin ? std::min(kPieceBytes, bytes - begin) : 0;
}

std::uint64_t sum(const Counts& counts) {
  std::uint64_t total = 0;
  for (const std::uint64_t count : counts) {
    total += count;
  }
  return total;
}

void move_bytes(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memmove(to, from, bytes);
  }
}

}  // namespace

CrossTransport::CrossTransport(std::shared_ptr<ByteTransport> bytes, int rank, int n_ranks)
    : bytes_(std::move(bytes)), rank_(rank), n_ranks_(n_ranks) {}

void CrossTransport::run(const Request& request, const WaitContext& context) {
  if (!ended_.empty()) {
    throw GroupError(concat(name(request.kind), ": the group has ended: ", ended_));
  }
  try {
    run_steps(request, context);
  } catch (const MismatchError&) {
    throw;  // agreed on by all ranks: the group goes on
  } catch (const Error& error) {
    ended_ =
        concat(name(request.kind), " #", sequence_ - 1, " on rank ", rank_, ": ", error.what());
    bytes_->abort(ended_);  // the others hear of it through their connections
    if (request.kind == OpKind::kMonitoredBarrier && rank_ == 0) {
      throw GroupError(concat("[Rank 0]: monitoredBarrier: ", ended_));
    }
    if (request.kind == OpKind::kMonitoredBarrier) {
      throw GroupError(monitored_barrier_refused_text(rank_, error.what()));
    }
    throw GroupError(group_over_text(ended_));
  } catch (...) {  // check_interrupt's own exception: passed on as it is
    ended_ = concat("rank ", rank_, " was interrupted in ", name(request.kind));
    bytes_->abort(ended_);
    throw;
  }
}

void CrossTransport::run_steps(const Request& request, const WaitContext& context) {
  arrive(request, context);
  if (auto mismatch = find_mismatch(headers_)) {
    throw MismatchError(*mismatch);
  }
  switch (pattern(request.kind)) {
    case Pattern::kNone:
      break;
    case Pattern::kExchange:
      exchange(request, context);
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot:
      reduce_pieces(request, context);
      break;
    case Pattern::kReduceScatter:
      reduce_scatter(request, context);
      break;
  }
}

void CrossTransport::arrive(const Request& request, const WaitContext& context) {
  const std::size_t bytes = header_bytes(n_ranks_);
  std::vector<std::byte> own(bytes);
  write_header(own.data(), make_header(request, sequence_, rank_, n_ranks_), request, n_ranks_);
  slots_.resize(bytes * static_cast<std::size_t>(n_ranks_));
  ++sequence_;
  bytes_->all_gather(own.data(), slots_.data(), bytes, context);
  headers_.clear();
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(n_ranks_); ++rank) {
    headers_.push_back(read_header(slots_.data() + rank * bytes, n_ranks_));
  }
}

void CrossTransport::exchange(const Request& request, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks_);
  move_bytes(request.outputs[static_cast<std::size_t>(rank_)].data,
             request.inputs[static_cast<std::size_t>(rank_)].data,
             request.outputs[static_cast<std::size_t>(rank_)].bytes);
  std::uint64_t longest = 0;  // of all pairs, so that every rank takes part in as many rounds
  for (const HeaderView& view : headers_) {
    for (std::size_t peer = 0; peer < n; ++peer) {
      longest = std::max(longest, view.send_counts[peer] * request.element_bytes);
    }
  }
  for (std::uint64_t begin = 0; begin < longest; begin += kPieceBytes) {
    Counts send_bytes(n);
    Counts receive_bytes(n);
    for (std::size_t peer = 0; peer < n; ++peer) {
      if (static_cast<int>(peer) != rank_) {
        send_bytes[peer] = part_at(begin, request.inputs[peer].bytes);
        receive_bytes[peer] = part_at(begin, request.outputs[peer].bytes);
      }
    }
    std::vector<std::byte> send(sum(send_bytes));
    std::vector<std::byte> receive(sum(receive_bytes));
    for (std::size_t peer = 0, at = 0; peer < n; at += send_bytes[peer], ++peer) {
      move_bytes(send.data() + at, request.inputs[peer].data + begin, send_bytes[peer]);
    }
    bytes_->all_to_all(send.data(), send_bytes, receive.data(), receive_bytes, context);
    for (std::size_t peer = 0, at = 0; peer < n; at += receive_bytes[peer], ++peer) {
      move_bytes(request.outputs[peer].data + begin, receive.data() + at, receive_bytes[peer]);
    }
  }
}

std::vector<double> CrossTransport::factors() const {
  std::vector<double> factors;
  if (headers_[0].header->op == ReduceOp::kPremulSum) {
    for (const HeaderView& view : headers_) {
      factors.push_back(view.header->factor);
    }
  }
  return factors;
}

void CrossTransport::reduce_pieces(const Request& request, const WaitContext& context) {
  const auto n = static_cast<std::uint64_t>(n_ranks_);
  const std::size_t element = request.element_bytes;
  const std::uint64_t piece = kPieceBytes / element * n;
  const bool to_all = pattern(request.kind) == Pattern::kReduceToAll;
  const std::vector<double> factors = this->factors();
  for (std::uint64_t done = 0; done < request.count; done += piece) {
    const std::uint64_t count = std::min(piece, request.count - done);
    const std::uint64_t per_rank = (count + n - 1) / n;
    const auto slice_bytes = [&](std::uint64_t rank) {
      return (std::min(count, (rank + 1) * per_rank) - std::min(count, rank * per_rank)) * element;
    };
    Counts send_bytes(n);
    for (std::uint64_t rank = 0; rank < n; ++rank) {
      send_bytes[rank] = slice_bytes(rank);
    }
    const std::uint64_t own_bytes = send_bytes[static_cast<std::size_t>(rank_)];
    const Counts own_from_each(n, own_bytes);
    std::vector<std::byte> contributions(own_bytes * n);
    bytes_->all_to_all(request.inputs[0].data + done * element, send_bytes, contributions.data(),
                       own_from_each, context);
    std::vector<const void*> sources;
    sources.reserve(n);
    for (std::uint64_t rank = 0; rank < n; ++rank) {
      sources.push_back(contributions.data() + rank * own_bytes);
    }
    std::vector<std::byte> reduced(own_bytes);
    reduce(reduced.data(), sources.data(), n_ranks_, own_bytes / element, request.dtype, request.op,
           factors.data());
    // Hand out the reduced slices: to everybody, or to the root alone.
    std::vector<std::byte> copies;
    Counts copy_bytes(n);
    for (std::uint64_t rank = 0; rank < n; ++rank) {
      if (to_all || static_cast<int>(rank) == request.root) {
        copy_bytes[rank] = own_bytes;
        copies.insert(copies.end(), reduced.begin(), reduced.end());
      }
    }
    const bool wants_result = to_all || rank_ == request.root;
    bytes_->all_to_all(copies.data(), copy_bytes,
                       wants_result ? request.outputs[0].data + done * element : nullptr,
                       wants_result ? send_bytes : Counts(n), context);
  }
}

void CrossTransport::reduce_scatter(const Request& request, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks_);
  const std::vector<double> factors = this->factors();
  std::uint64_t longest = 0;
  for (const ConstSpan& input : request.inputs) {
    longest = std::max<std::uint64_t>(longest, input.bytes);
  }
  for (std::uint64_t begin = 0; begin < longest; begin += kPieceBytes) {
    Counts send_bytes(n);
    for (std::size_t peer = 0; peer < n; ++peer) {
      send_bytes[peer] = part_at(begin, request.inputs[peer].bytes);
    }
    std::vector<std::byte> send(sum(send_bytes));
    for (std::size_t peer = 0, at = 0; peer < n; at += send_bytes[peer], ++peer) {
      move_bytes(send.data() + at, request.inputs[peer].data + begin, send_bytes[peer]);
    }
    const std::uint64_t own_bytes = part_at(begin, request.outputs[0].bytes);
    std::vector<std::byte> contributions(own_bytes * n);
    bytes_->all_to_all(send.data(), send_bytes, contributions.data(), Counts(n, own_bytes),
                       context);
    std::vector<const void*> sources;
    sources.reserve(n);
    for (std::size_t rank = 0; rank < n; ++rank) {
      sources.push_back(contributions.data() + rank * own_bytes);
    }
    reduce(request.outputs[0].data + begin, sources.data(), n_ranks_,
           own_bytes / request.element_bytes, request.dtype, request.op, factors.data());
  }
}

void CrossTransport::abort(const std::string& reason) { bytes_->abort(reason); }

}  // namespace horon
