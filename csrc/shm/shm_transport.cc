#include "shm/shm_transport.h"

#include "core/error.h"
#include "core/monitored_barrier.h"
#include "core/published_stream.h"

namespace horon {

ShmTransport::ShmTransport(Segment* segment, const Peers* peers)
    : segment_(segment),
      peers_(peers),
      rank_(peers->rank),
      n_ranks_(peers->n_ranks()),
      board_(segment, peers),
      headers_(static_cast<std::size_t>(peers->n_ranks())) {}

void ShmTransport::run(const Request& request, const WaitContext& context) {
  if (!ended_.empty()) {
    throw GroupError(concat(name(request.kind), ": the group has ended: ", ended_));
  }
  try {
    run_steps(request, context);
    finished_.store(sequence_, std::memory_order_relaxed);
  } catch (const MismatchError&) {
    finished_.store(sequence_, std::memory_order_relaxed);
    throw;  // agreed on by all ranks: the group goes on
  } catch (const TimeoutError& error) {
    if (request.kind == OpKind::kMonitoredBarrier && rank_ == 0) {
      end_group(request,
                monitored_barrier_timeout_text(board_.missing_ranks(), request.monitor_all_ranks,
                                               context.deadline.timeout()));
    }
    end_group(request, error.what());
  } catch (const GroupError& error) {
    end_group(request, error.what());
  } catch (...) {  // check_interrupt's own exception: passed on as it is
    ended_ =
        concat("rank ", rank_, " was interrupted in ", name(request.kind), " #", sequence_ - 1);
    segment_->poison(sequence_ - 1, ended_);
    throw;
  }
}

void ShmTransport::end_group(const Request& request, const std::string& reason) {
  const std::string where =
      concat(name(request.kind), " #", sequence_ - 1, " on rank ", rank_, " (",
             describe(headers_[static_cast<std::size_t>(rank_)], n_ranks_), ")");
  ended_ = segment_->is_poisoned() ? reason : concat(where, ": ", reason);
  segment_->poison(sequence_ - 1, ended_);
  if (request.kind == OpKind::kMonitoredBarrier && rank_ != 0) {
    throw GroupError(monitored_barrier_refused_text(rank_, reason));
  }
  throw GroupError(
      concat(where, ": ", reason, ". The group can not be used any more; destroy it."));
}

void ShmTransport::run_steps(const Request& request, const WaitContext& context) {
  arrive(request, context);
  if (auto mismatch = find_mismatch(headers_)) {
    throw MismatchError(*mismatch);
  }
  switch (pattern(request.kind)) {
    case Pattern::kNone:
      break;
    case Pattern::kExchange:
      all_inline() ? exchange_inline(request) : exchange(request, context);
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot:
      all_inline() ? reduce_inline(request) : reduce_pieces(request, context);
      break;
    case Pattern::kReduceScatter:
      all_inline() ? reduce_scatter_inline(request) : reduce_scatter(request, context);
      break;
  }
}

void ShmTransport::arrive(const Request& request, const WaitContext& context) {
  // Slots alternate: the slot written now was last read two operations ago, and everybody has
  // arrived at the operation between since then.
  const int slot_parity = static_cast<int>(sequence_ % 2);
  std::byte* slot = segment_->slot(slot_parity, rank_);
  Header header = make_header(request, sequence_, rank_, n_ranks_);
  header.is_inline =
      header.is_refused == 0 && header.published_bytes <= segment_->layout().inline_bytes() ? 1 : 0;
  write_header(slot, header, request, n_ranks_);
  if (header.is_inline != 0) {
    copy_from_stream(stream_pieces(request, rank_, n_ranks_), 0, header.published_bytes,
                     slot + header_bytes(n_ranks_));
  }
  for (int peer = 0; peer < n_ranks_; ++peer) {
    headers_[static_cast<std::size_t>(peer)] =
        read_header(segment_->slot(slot_parity, peer), n_ranks_);
  }
  ++sequence_;
  step(context);
  if (segment_->is_poisoned(header.sequence)) {  // somebody gave this operation up before we came
    throw GroupError(segment_->poison_text());
  }
}

void ShmTransport::step(const WaitContext& context) {
  board_.finish_step();
  board_.await_all(context);
}

bool ShmTransport::all_inline() const {
  for (const HeaderView& view : headers_) {
    if (view.header->is_inline == 0) {
      return false;
    }
  }
  return true;
}

void ShmTransport::abort(const std::string& reason) {
  // Others may still be busy with operations that this rank has done its part of: those succeed.
  segment_->poison(finished_.load(std::memory_order_relaxed),
                   concat("rank ", rank_, " aborted the group: ", reason));
  board_.abort(reason);
}

void ShmTransport::depart() { segment_->depart(rank_); }

}  // namespace horon
