#include "shm/shm_transport.h"

#include <utility>

#include "core/error.h"
#include "core/inline_collective.h"
#include "core/monitored_barrier.h"
#include "core/published_stream.h"
#include "core/running_operation.h"
#include "shm/arena_collectives.h"

namespace horon {
namespace {

// Of more bytes the reduction takes much longer than the thread's wake-ups: nothing was gained.
constexpr std::uint64_t kMostBytesToMeetFor = std::uint64_t{4} << 20;

}  // namespace

ShmTransport::ShmTransport(Segment* segment, const Peers* peers, const GroupArenas* arenas)
    : segment_(segment),
      peers_(peers),
      arenas_(arenas),
      rank_(peers->rank),
      n_ranks_(peers->n_ranks()),
      board_(segment, peers),
      deposits_(segment, &board_, &store_, peers->rank),
      claims_(segment, &board_),
      ring_(segment->layout().buffer_bytes()) {}

// Runs `operation`, the one with that number, whose errors but a mismatch end the group.
template <typename Operation>
void ShmTransport::run_guarded(const Request& request, std::uint64_t number,
                               const WaitContext& context, const Operation& operation) {
  if (!ended_.empty()) {
    throw GroupError(concat(name(request.kind), ": the group has ended: ", ended_));
  }
  const OperationName named = whole_of(request, number);
  const RunningOperation running(&named);
  try {
    operation();
  } catch (const MismatchError&) {
    throw;  // agreed on by all ranks: the group goes on
  } catch (const TimeoutError& error) {
    if (request.kind == OpKind::kMonitoredBarrier && rank_ == 0) {
      end_group(request, number,
                monitored_barrier_timeout_text(board_.missing_ranks(), request.monitor_all_ranks,
                                               context.deadline.timeout()));
    }
    end_group(request, number, error.what(), error.missing());
  } catch (const GroupError& error) {
    end_group(request, number, error.what());
  } catch (...) {  // check_interrupt's own exception: passed on as it is
    quarantine(request);
    ended_ = concat("rank ", named.rank, " was interrupted in ", name(named.request->kind), " #",
                    named.number);
    segment_->poison(deposits_.current(), ended_);
    throw;
  }
}

void ShmTransport::run(const Request& request, const WaitContext& context) {
  carry_out(request, context, false);
}

void ShmTransport::carry_out(const Request& request, const WaitContext& context, bool may_leave) {
  run_guarded(request, deposits_.current(), context, [&] {
    if (!std::exchange(has_arrived_, false)) {
      deposits_.await_room(context);
      arrive(request);
    }
    complete_current(request, context, may_leave);
  });
}

Transport::Leaving ShmTransport::run_and_leave(const Request& request, const WaitContext& context) {
  common_lead_bytes_ = 0;
  carry_out(request, context, true);
  if (left_ && has_left_ended()) {
    left_.reset();
  }
  return {left_.has_value(), common_lead_bytes_};
}

bool ShmTransport::has_left_ended() { return board_.have_all_reached(Counter::kStep, left_step_); }

void ShmTransport::await_left(const WaitContext& context) {
  std::optional<Request> left;
  left.swap(left_);
  if (left) {
    shows_arena_ = true;
    run_guarded(*left, deposits_.current() - 1, context,
                [&] { board_.await_all(Counter::kStep, left_step_, context); });
  }
}

void ShmTransport::let_go_left() {
  const bool has_ended = has_left_ended();
  if (left_ && !has_ended) {
    quarantine_tensors(*left_, *arenas_);
  }
  left_.reset();
}

void ShmTransport::arrive(const Request& request) {
  const std::uint64_t offset = arena_offset(request);
  shows_arena_ = offset < kSeesNoArenas;
  if (may_copy_first(request, offset)) {
    copy_in_first_slices(request);
  }
  deposits_.deposit(request, offset);
}

bool ShmTransport::meet(const Request& request, std::chrono::milliseconds patience) {
  const auto longest = longest_stream(request, n_ranks_);
  if (!peers_->may_meet() || !longest || *longest <= segment_->layout().inline_bytes() ||
      *longest > kMostBytesToMeetFor) {
    return false;
  }
  ++n_meetings_;  // before what differs from rank to rank
  if (!ended_.empty() || !request.refusal.empty() || !deposits_.has_room() ||
      !meeting_trust_.begin_wait(n_meetings_)) {
    return false;
  }
  arrive(request);
  has_arrived_ = true;
  const bool has_met = deposits_.spin_for_arrivals(patience);
  meeting_trust_.record(has_met);
  return has_met;
}

void ShmTransport::let_go(const Request& request) {
  if (has_arrived_) {
    quarantine(request);
  }
}

bool ShmTransport::start(const Request& request) {
  const auto longest = longest_stream(request, n_ranks_);
  lacks_room_ = false;
  if (!ended_.empty() || !request.refusal.empty() || !longest ||
      *longest > segment_->layout().inline_bytes() || pending_writes_.overlaps_inputs(request)) {
    return false;
  }
  lacks_room_ = !deposits_.has_room_to_start(*longest);
  if (lacks_room_) {
    wanted_bytes_ = *longest;
    return false;
  }
  const bool sees_arenas = arenas_ != nullptr && arenas_->is_usable();
  deposits_.deposit(request, sees_arenas ? kNotInArena : kSeesNoArenas, *longest);
  pending_writes_.push(request);
  return true;
}

bool ShmTransport::is_ready() {
  return !ended_.empty() || deposits_.have_all_arrived() ||
         segment_->is_poisoned(deposits_.current()) || deposits_.arrivals_would_fail();
}

bool ShmTransport::await_start() {
  if (!ended_.empty() || !lacks_room_) {
    return false;
  }
  if (deposits_.has_room_to_start(wanted_bytes_)) {
    return true;
  }
  const bool may_finish_own = deposits_.current() < deposits_.next();
  may_finish_own ? deposits_.await_arrivals_briefly() : deposits_.await_room_briefly();
  return true;
}

void ShmTransport::complete(const Request& request, const WaitContext& context) {
  pending_writes_.pop();
  shows_arena_ = false;
  run_guarded(request, deposits_.current(), context, [&] { complete_current(request, context); });
}

std::uint64_t ShmTransport::arena_offset(const Request& request) const {
  if (arenas_ == nullptr) {
    return kSeesNoArenas;
  }
  // Small messages travel with the header. Looked up at every call: tensors come and go.
  const bool is_inline = request.refusal.empty() && published_bytes(request, rank_, n_ranks_) <=
                                                        segment_->layout().inline_bytes();
  return is_inline && arenas_->is_usable() ? kNotInArena
                                           : arena_offset_of(request, *arenas_, rank_);
}

void ShmTransport::quarantine(const Request& request) {
  if (shows_arena_) {  // then others may have begun to use the tensors
    quarantine_tensors(request, *arenas_);
  }
}

OperationName ShmTransport::whole_of(const Request& request, std::uint64_t number) const {
  return request.whole == nullptr ? OperationName{&request, number, rank_, n_ranks_}
                                  : *request.whole;
}

void ShmTransport::end_group(const Request& request, std::uint64_t number,
                             const std::string& reason, const std::vector<int>& missing) {
  quarantine(request);
  const std::string where = describe(whole_of(request, number));
  ended_ = segment_->is_poisoned() ? reason : concat(where, ": ", reason);
  segment_->poison(deposits_.current(), ended_);
  if (request.kind == OpKind::kMonitoredBarrier && rank_ != 0) {
    throw GroupError(monitored_barrier_refused_text(rank_, reason));
  }
  throw EndedError(group_over_text(concat(where, ": ", reason)), reason, missing);
}

void ShmTransport::complete_current(const Request& request, const WaitContext& context,
                                    bool may_leave) {
  deposits_.await_all(context);
  if (segment_->is_poisoned(deposits_.current())) {  // given up by somebody before we came
    throw GroupError(segment_->poison_text());
  }
  const auto finish = [&] {
    deposits_.finish();
    finished_.store(deposits_.current(), std::memory_order_relaxed);
  };
  if (auto mismatch = find_mismatch(headers())) {
    finish();
    throw MismatchError(*mismatch);
  }
  shows_arena_ = goes_through_arenas(headers());  // otherwise nobody touches the tensors
  if (shows_arena_) {
    if (peers_->claims && is_reduction_of_whole_tensors(request.kind)) {
      claim_in_arenas(request, headers(), *arenas_, rank_, factors_of(headers()).data(), store_,
                      claims_, context);
    } else {
      run_in_arenas(request, headers(), *arenas_, rank_, factors_of(headers()).data(), store_);
      board_.finish_step();
      if (may_leave) {
        common_lead_bytes_ = common_lead(headers());
        left_ = request;
        left_step_ = board_.own(Counter::kStep);
      } else {
        board_.await_all(context);
      }
    }
    finish();
    return;
  }
  if (are_inline(headers())) {
    run_inline(request, headers(), rank_);
    finish();
    return;
  }
  switch (pattern(request.kind)) {
    case Pattern::kNone:
      break;
    case Pattern::kExchange:
      exchange(request, context);
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot:
      reduce_large(request, context);
      break;
    case Pattern::kReduceScatter:
      reduce_scatter(request, context);
      break;
  }
  finish();
}

bool ShmTransport::may_copy_first(const Request& request, std::uint64_t arena_offset) const {
  return arena_offset >= kSeesNoArenas && request.refusal.empty() &&
         is_reduction_of_whole_tensors(request.kind) &&
         request.inputs[0].bytes > segment_->layout().inline_bytes();
}

void ShmTransport::reduce_large(const Request& request, const WaitContext& context) {
  // Known to all ranks from the headers: has every rank brought its first piece already?
  bool is_first_copied = true;
  for (const HeaderView& view : headers()) {
    is_first_copied = is_first_copied && view.header->arena_offset >= kSeesNoArenas;
  }
  reduce_owned(request, is_first_copied, context);
}

void ShmTransport::step(const WaitContext& context) {
  board_.finish_step();
  board_.await_all(context);
}

void ShmTransport::abort(const std::string& reason) {
  // Others may still be busy with operations that this rank has done its part of: those succeed.
  segment_->poison(finished_.load(std::memory_order_relaxed),
                   concat("rank ", peers_->number(rank_), " aborted the group: ", reason));
  board_.abort(reason);
}

void ShmTransport::depart() { segment_->depart(rank_); }

}  // namespace horon
