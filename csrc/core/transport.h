// How collectives of one group travel. Two exist: shared memory within a host, and bytes carried by
// somebody else's process group between hosts.
#pragma once

#include <chrono>
#include <string>

#include "core/request.h"
#include "core/wait_context.h"

namespace horon {

// Thread safety: run belongs to one thread at a time (the lane sees to it); abort and depart may
// come from any thread, also while run blocks.
class Transport {
 public:
  virtual ~Transport() = default;

  // Runs one collective to its end, the arrival phase included.
  // Throws MismatchError (the ranks disagree: only this call failed, on every rank), GroupError and
  // its kinds (the group is over), or what context.check_interrupt throws (the group is over).
  // Requires that nothing that was started is left to be completed.
  virtual void run(const Request& request, const WaitContext& context) = 0;

  // Whether run() takes reductions to all ranks of a tensor in pieces (Request::pieces), of so many
  // bytes. Ranks that bring theirs in one piece may take part in the same operation.
  virtual bool takes_pieces(std::uint64_t /*bytes*/) const { return false; }

  // Those who come to an operation at the same time are some tenths of a millisecond apart.
  static constexpr std::chrono::milliseconds kMeetingPatience{1};

  struct Leaving {
    // This rank has done its part and others have not: they go on using the tensor.
    bool is_left = false;
    // Every rank had a lead of at least so much: it made no difference.
    std::uint32_t common_lead_bytes = 0;
  };
  // As run(), of a reduction to all of one tensor. If something is left, the next call has to be
  // await_left(), or let_go_left() if the group ends first.
  virtual Leaving run_and_leave(const Request& request, const WaitContext& context) {
    run(request, context);
    return {};
  }
  // Whether await_left() would not wait.
  virtual bool has_left_ended() { return true; }
  // Waits for what was left. Throws as run().
  virtual void await_left(const WaitContext& /*context*/) {}
  // What was left, if anything still is, will not be waited for; others may go on using it unless
  // it has ended.
  virtual void let_go_left() {}

  // Split phase: start() brings this rank's part of an operation without waiting for anybody, and
  // complete() ends it, later, in the order of the starts. start() returns false, and has done
  // nothing, when that is not possible now, or never for such an operation. An operation that was
  // started may not need this rank again before the others can complete theirs.
  virtual bool start(const Request& /*request*/) { return false; }
  // Whether complete() of the oldest started operation would end without waiting; also when that
  // would be in an error, because a rank is gone or the group has ended.
  virtual bool is_ready() { return true; }
  // After start() returned false: waits a little for what keeps it from being possible. False when
  // that is nothing that others could change.
  virtual bool await_start() { return false; }
  // Throws as run().
  virtual void complete(const Request& request, const WaitContext& context) {
    run(request, context);
  }

  // For an operation that start() does not take and that the others may be about to come to as
  // well: brings this rank's part and waits for them, at most for so long, if that is worth it.
  // Whether all have come, so that run() would wait for nobody who computes. In either case
  // run() of the same request has to be the next call, from any thread, or let_go() if the group
  // ends first. Requires what run() requires.
  virtual bool meet(const Request& /*request*/, std::chrono::milliseconds /*patience*/) {
    return false;
  }
  // Others may have begun to use the tensors of an operation that was met for and will not be run.
  virtual void let_go(const Request& /*request*/) {}

  // Ends the group for all ranks: running and later operations fail with the reason.
  virtual void abort(const std::string& reason) = 0;

  // Says goodbye: this rank runs nothing more. Fails nothing that it has already done its part of.
  virtual void depart() = 0;
};

}  // namespace horon
