#include "cross/cross_transport.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/inline_collective.h"
#include "core/monitored_barrier.h"
#include "core/published_stream.h"
#include "core/running_operation.h"
#include "cross/sliced_reduction.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

// Of data that travels with each header. All ranks get all of it, used or not.
std::size_t inline_bytes(int n_ranks) {
  constexpr std::size_t kMostOfAll = std::size_t{16} << 10;
  return std::clamp<std::size_t>(kMostOfAll / static_cast<std::size_t>(n_ranks) / 64 * 64, 64,
                                 1024);
}

std::uint64_t part_at(std::uint64_t begin, std::uint64_t bytes, std::uint64_t piece) {
  return bytes > begin ? std::min(piece, bytes - begin) : 0;
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
  if (on_end_) {
    on_end_(reason);
  }
}

void CrossTransport::run(const Request& request, const WaitContext& context) {
  if (!ended_.empty()) {
    throw GroupError(concat(name(request.kind), ": the group has ended: ", ended_));
  }
  const OperationName operation{&request, sequence_, rank_, n_ranks_};
  const RunningOperation running(&operation);
  try {
    run_steps(request, context);
  } catch (const MismatchError&) {
    throw;  // agreed on by all ranks: the group goes on
  } catch (const TimeoutError& error) {
    const bool is_verdict = request.kind == OpKind::kMonitoredBarrier && rank_ == 0;
    fail(operation, is_verdict
                        ? monitored_barrier_timeout_text(error.missing(), request.monitor_all_ranks,
                                                         context.deadline.timeout())
                        : error.what());
  } catch (const Error& error) {
    fail(operation, error.what());
  } catch (...) {  // check_interrupt's own exception: passed on as it is
    end(concat("rank ", rank_, " was interrupted in ", name(request.kind)));
    throw;
  }
}

void CrossTransport::fail(const OperationName& operation, const std::string& reason) {
  end(concat(describe(operation), ": ", reason));
  if (operation.request->kind == OpKind::kMonitoredBarrier && rank_ != 0) {
    throw GroupError(monitored_barrier_refused_text(rank_, reason));
  }
  throw GroupError(group_over_text(ended_));
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
  if (are_inline(headers_)) {
    run_inline(request, headers_, rank_);
    return;
  }
  const auto steps = hosts_ != nullptr && has_reduction(request.kind)
                         ? two_steps(request.dtype, request.op, n_ranks_)
                         : std::nullopt;
  switch (pattern(request.kind)) {
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
  const std::size_t most_inline = inline_bytes(n_ranks_);
  const std::size_t bytes = header_bytes(n_ranks_) + most_inline;
  std::byte* const own = own_slot_.need(bytes);
  Header header = make_header(request, sequence_, rank_, n_ranks_);
  header.is_inline = header.is_refused == 0 && header.published_bytes <= most_inline ? 1 : 0;
  std::memset(own, 0, header_bytes(n_ranks_));
  write_header(own, header, request, n_ranks_);
  std::size_t used = header_bytes(header, n_ranks_);
  if (header.is_inline != 0) {
    used += copy_from_stream(stream_pieces(request, rank_, n_ranks_), 0, header.published_bytes,
                             own + used);
  }
  std::memset(own + used, 0, bytes - used);  // nothing of this process goes elsewhere by chance
  std::byte* const slots = slots_.need(bytes * static_cast<std::size_t>(n_ranks_));
  ++sequence_;
  if (hosts_) {
    hosts_->all_gather(own, slots, bytes, call(request, context));
  } else {
    bytes_->all_gather(own, slots, bytes, context);
  }
  headers_.clear();
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(n_ranks_); ++rank) {
    headers_.push_back(read_header(slots + rank * bytes, n_ranks_));
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
  const std::uint64_t piece = piece_bytes_per_pair(n);
  for (std::uint64_t begin = 0; begin < longest; begin += piece) {
    SentSpans send(n);
    ReceivedSpans receive(n);
    std::size_t swapped_bytes = 0;
    const auto swaps_in_place = [&](std::size_t peer) {
      return request.inputs[peer].data == request.outputs[peer].data;
    };
    for (std::size_t peer = 0; peer < n; ++peer) {
      if (crosses(own, peer)) {
        send[peer] = {request.inputs[peer].data + begin,
                      part_at(begin, request.inputs[peer].bytes, piece)};
        receive[peer] = {request.outputs[peer].data + begin,
                         part_at(begin, request.outputs[peer].bytes, piece)};
        swapped_bytes += swaps_in_place(peer) ? send[peer].bytes : 0;
      }
    }
    std::byte* copy = scratch_.need(swapped_bytes);
    for (std::size_t peer = 0; peer < n; ++peer) {
      if (swaps_in_place(peer) && send[peer].bytes > 0) {
        move_bytes(copy, send[peer].data, send[peer].bytes);
        send[peer].data = copy;
        copy += send[peer].bytes;
      }
    }
    bytes_->exchange(send, receive, context);
  }
}

void CrossTransport::reduce_pieces(const Request& request, const WaitContext& context) {
  const std::size_t element = request.element_bytes;
  const std::uint64_t piece = piece_bytes_per_pair(static_cast<std::size_t>(n_ranks_)) / element *
                              static_cast<std::uint64_t>(n_ranks_);
  const bool to_all = pattern(request.kind) == Pattern::kReduceToAll;
  const bool wants_result = to_all || rank_ == request.root;
  const PerRank<double> factors = factors_of(headers_);
  const auto fold = [&](std::byte* result, const void* const* sources, std::uint64_t count) {
    reduce(result, sources, n_ranks_, count, request.dtype, request.op, factors.data());
  };
  for (std::uint64_t done = 0; done < request.count; done += piece) {
    const std::uint64_t count = std::min(piece, request.count - done);
    reduce_in_slices(
        *bytes_, rank_, n_ranks_, {count, element, element, to_all ? -1 : request.root, fold},
        request.inputs[0].data + done * element,
        wants_result ? request.outputs[0].data + done * element : nullptr, scratch_, context);
  }
}

void CrossTransport::reduce_scatter(const Request& request, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks_);
  const PerRank<double> factors = factors_of(headers_);
  std::uint64_t longest = 0;
  for (const ConstSpan& input : request.inputs) {
    longest = std::max<std::uint64_t>(longest, input.bytes);
  }
  const std::uint64_t piece = piece_bytes_per_pair(n);
  for (std::uint64_t begin = 0; begin < longest; begin += piece) {
    const std::uint64_t own_bytes = part_at(begin, request.outputs[0].bytes, piece);
    SentSpans send(n);
    for (std::size_t peer = 0; peer < n; ++peer) {
      send[peer] = {request.inputs[peer].data + begin,
                    part_at(begin, request.inputs[peer].bytes, piece)};
    }
    const auto sources =
        exchange_parts(*bytes_, rank_, send, scratch_.need(own_bytes * (n - 1)), context);
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
  bytes_->depart();
  if (hosts_) {
    hosts_->depart();
  }
}

}  // namespace horon
