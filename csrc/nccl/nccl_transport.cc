#include "nccl/nccl_transport.h"

#include "nccl/premul_ops.h"

namespace horon {
namespace {

// ncclGroupStart and its ncclGroupEnd, which has to be called even when a call between them failed:
// the group is a counter of the thread, and later calls would wait in it for ever.
class Group {
 public:
  Group(NcclApi& api, const Communicator::Use& use) : api_(api), use_(use) {
    use_.check(api_.group_start(), "ncclGroupStart");
  }
  ~Group() {
    if (!has_ended_) {
      (void)api_.group_end();  // repeats the error that is on its way to the caller
    }
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void end() {
    has_ended_ = true;
    use_.check(api_.group_end(), "ncclGroupEnd");
  }

 private:
  NcclApi& api_;
  const Communicator::Use& use_;
  bool has_ended_ = false;
};

}  // namespace

NcclTransport::NcclTransport(NcclApi& api, std::unique_ptr<Communicator> communicator,
                             LaunchCopies launch_copies)
    : api_(api), communicator_(std::move(communicator)), launch_copies_(std::move(launch_copies)) {}

void NcclTransport::issue(const NcclPlan& plan, StreamHandle stream, const std::string& operation,
                          const Deadline& deadline) {
  if (!plan.before.empty()) {
    launch_copies_(plan.before, stream);
  }
  if (!plan.calls.empty()) {
    issue_calls(plan.calls, stream, operation, deadline);
  }
  if (!plan.after.empty()) {
    launch_copies_(plan.after, stream);
  }
}

void NcclTransport::issue_calls(const std::vector<NcclCall>& calls, StreamHandle stream,
                                const std::string& operation, const Deadline& deadline) {
  const Communicator::Use use(*communicator_, operation);
  PremulOps ops(api_, use);
  std::vector<NcclReduceOp> op_of_call;
  op_of_call.reserve(calls.size());
  for (const NcclCall& call : calls) {
    op_of_call.push_back(ops.op_for(call.reduction));
  }
  const auto issue_all = [&] {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      use.check(issue_call(calls[i], op_of_call[i], use.handle(), stream), name(calls[i].function));
    }
  };
  if (calls.size() == 1) {
    issue_all();
  } else {
    Group group(api_, use);
    issue_all();
    group.end();
  }
  use.await_ready(deadline);
}

NcclResult NcclTransport::issue_call(const NcclCall& call, NcclReduceOp op, NcclCommHandle comm,
                                     StreamHandle stream) {
  const NcclDataType dtype = call.reduction.dtype;
  switch (call.function) {
    case NcclFunction::kAllReduce:
      return api_.all_reduce(call.send, call.recv, call.count, dtype, op, comm, stream);
    case NcclFunction::kBroadcast:
      return api_.broadcast(call.send, call.recv, call.count, dtype, call.peer, comm, stream);
    case NcclFunction::kReduce:
      return api_.reduce(call.send, call.recv, call.count, dtype, op, call.peer, comm, stream);
    case NcclFunction::kAllGather:
      return api_.all_gather(call.send, call.recv, call.count, dtype, comm, stream);
    case NcclFunction::kReduceScatter:
      return api_.reduce_scatter(call.send, call.recv, call.count, dtype, op, comm, stream);
    case NcclFunction::kSend:
      return api_.send(call.send, call.count, dtype, call.peer, comm, stream);
    case NcclFunction::kRecv:
      return api_.recv(call.recv, call.count, dtype, call.peer, comm, stream);
  }
  return NcclResult::kInternalError;
}

}  // namespace horon
