#include "cross/cross_transport.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/monitored_barrier.h"
#include "cross/sliced_reduction.h"
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

CrossTransport::CrossTransport(std::shared_ptr<ByteTransport> bytes, int rank, int n_ranks,
                               std::unique_ptr<HostCollectives> hosts)
    : bytes_(std::move(bytes)), rank_(rank), n_ranks_(n_ranks), hosts_(std::move(hosts)) {}

// The others hear of it through their connections, or where they share memory.
void CrossTransport::end(const std::string& reason) {
  ended_ = reason;
  abort(reason);
}

void CrossTransport::run(const Request& request, const WaitContext& context) {
  if (!ended_.empty()) {
    throw GroupError(concat(name(request.kind), ": the group has ended: ", ended_));
  }
  const OperationName operation{&request, sequence_, rank_, n_ranks_};
  try {
    run_steps(request, context);
  } catch (const MismatchError&) {
    throw;  // agreed on by all ranks: the group goes on
  } catch (const Error& error) {
    end(concat(describe(operation), ": ", error.what()));
    if (request.kind == OpKind::kMonitoredBarrier && rank_ == 0) {
      throw GroupError(concat("[Rank 0]: monitoredBarrier: ", ended_));
    }
    if (request.kind == OpKind::kMonitoredBarrier) {
      throw GroupError(monitored_barrier_refused_text(rank_, error.what()));
    }
    throw GroupError(group_over_text(ended_));
  } catch (...) {  // check_interrupt's own exception: passed on as it is
    end(concat("rank ", rank_, " was interrupted in ", name(request.kind)));
    throw;
  }
}

HostCollectives::Call CrossTransport::call(const Request& request,
                                           const WaitContext& context) const {
  return {{&request, sequence_ - 1, rank_, n_ranks_}, context};
}

void CrossTransport::run_steps(const Request& request, const WaitContext& context) {
  arrive(request, context);
  if (auto mismatch = find_mismatch(headers_)) {
    throw MismatchError(*mismatch);
  }
  const Pattern moves = pattern(request.kind);
  const auto steps = hosts_ != nullptr && has_reduction(request.kind)
                         ? two_steps(request.dtype, request.op, n_ranks_)
                         : std::nullopt;
  switch (moves) {
    case Pattern::kNone:
      break;
    case Pattern::kExchange:
      if (hosts_) {
        hosts_->exchange_with_neighbours(request, call(request, context));
      }
      if (hosts_ && has_shared_input(request.kind)) {
        hosts_->share_between_hosts(request, headers_, call(request, context));
      } else {
        exchange(request, context);
      }
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot:
      steps ? hosts_->reduce(request, *steps, call(request, context))
            : reduce_pieces(request, context);
      break;
    case Pattern::kReduceScatter:
      steps ? hosts_->reduce_scatter(request, *steps, call(request, context))
            : reduce_scatter(request, context);
      break;
  }
}

void CrossTransport::arrive(const Request& request, const WaitContext& context) {
  const std::size_t bytes = header_bytes(n_ranks_);
  std::vector<std::byte> own(bytes);
  write_header(own.data(), make_header(request, sequence_, rank_, n_ranks_), request, n_ranks_);
  slots_.resize(bytes * static_cast<std::size_t>(n_ranks_));
  ++sequence_;
  if (hosts_) {
    hosts_->all_gather(own.data(), slots_.data(), bytes, call(request, context));
  } else {
    bytes_->all_gather(own.data(), slots_.data(), bytes, context);
  }
  headers_.clear();
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(n_ranks_); ++rank) {
    headers_.push_back(read_header(slots_.data() + rank * bytes, n_ranks_));
  }
}

// Whether what the one gives to the other goes over the network.
bool CrossTransport::crosses(std::size_t source, std::size_t destination) const {
  return hosts_ == nullptr
             ? source != destination
             : hosts_->layout().host_of[source] != hosts_->layout().host_of[destination];
}

void CrossTransport::exchange(const Request& request, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks_);
  const auto own = static_cast<std::size_t>(rank_);
  if (!hosts_) {
    move_bytes(request.outputs[own].data, request.inputs[own].data, request.outputs[own].bytes);
  }
  std::uint64_t longest = 0;  // of all pairs, so that every rank takes part in as many rounds
  for (std::size_t source = 0; source < n; ++source) {
    for (std::size_t peer = 0; peer < n; ++peer) {
      if (crosses(source, peer)) {
        longest = std::max(longest, headers_[source].send_counts[peer] * request.element_bytes);
      }
    }
  }
  for (std::uint64_t begin = 0; begin < longest; begin += kPieceBytes) {
    Counts send_bytes(n);
    Counts receive_bytes(n);
    for (std::size_t peer = 0; peer < n; ++peer) {
      if (crosses(own, peer)) {
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
  const std::size_t element = request.element_bytes;
  const std::uint64_t piece = kPieceBytes / element * static_cast<std::uint64_t>(n_ranks_);
  const bool to_all = pattern(request.kind) == Pattern::kReduceToAll;
  const bool wants_result = to_all || rank_ == request.root;
  const std::vector<double> factors = this->factors();
  const auto fold = [&](std::byte* result, const void* const* sources, std::uint64_t count) {
    reduce(result, sources, n_ranks_, count, request.dtype, request.op, factors.data());
  };
  for (std::uint64_t done = 0; done < request.count; done += piece) {
    const std::uint64_t count = std::min(piece, request.count - done);
    reduce_in_slices(*bytes_, rank_, n_ranks_,
                     {count, element, element, to_all ? -1 : request.root, fold},
                     request.inputs[0].data + done * element,
                     wants_result ? request.outputs[0].data + done * element : nullptr, context);
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

void CrossTransport::abort(const std::string& reason) {
  bytes_->abort(reason);
  if (hosts_) {
    hosts_->abort(reason);
  }
}

void CrossTransport::depart() {
  if (hosts_) {
    hosts_->depart();
  }
}

}  // namespace horon
