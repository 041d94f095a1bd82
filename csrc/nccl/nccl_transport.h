// Carries out plans of NCCL calls on streams.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/nccl_plan.h"

namespace horon {

// Queues copies within the device on a stream: plan_copies and launch_pack, or a test's loop.
using LaunchCopies = std::function<void(const std::vector<ByteCopy>&, StreamHandle)>;

// Thread safety: issue() and close() belong to one thread at a time; check_async_error() and
// abort() may come from any.
// Ownership: owns its communicator; the api must outlive it.
class NcclTransport {
 public:
  NcclTransport(NcclApi& api, std::unique_ptr<Communicator> communicator,
                LaunchCopies launch_copies);

  int rank() const { return communicator_->rank(); }
  int n_ranks() const { return communicator_->n_ranks(); }
  // For split and shrink.
  Communicator& communicator() { return *communicator_; }

  // Queues the plan on the stream: copies, one group of calls, copies. When it returns everything
  // is queued, so an event may be recorded; it does not wait for the GPU. Requires that the
  // stream's device is current, and that all memory lives until the stream has come past.
  // `operation` is for messages: "all_reduce #42 'layer1.weight'".
  // Throws UsageError (NCCL refused the arguments; nothing was queued), TimeoutError at the
  // deadline, GroupError and its kinds (only abort() makes sense now).
  void issue(const NcclPlan& plan, StreamHandle stream, const std::string& operation,
             const Deadline& deadline);

  // For the thread that watches. See Communicator.
  std::optional<std::string> check_async_error() { return communicator_->check_async_error(); }
  void abort(const std::string& reason) { communicator_->abort(reason); }
  // Waits for what was queued. See Communicator::finalize.
  void close(const Deadline& deadline) { communicator_->finalize(deadline); }

 private:
  void issue_calls(const std::vector<NcclCall>& calls, StreamHandle stream,
                   const std::string& operation, const Deadline& deadline);
  NcclResult issue_call(const NcclCall& call, NcclReduceOp op, NcclCommHandle comm,
                        StreamHandle stream);

  NcclApi& api_;
  const std::unique_ptr<Communicator> communicator_;
  const LaunchCopies launch_copies_;
};

}  // namespace horon
