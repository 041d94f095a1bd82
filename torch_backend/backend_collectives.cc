// HoronBackend: the collectives, one short method per call of c10d.

#include "backend.h"
#include "core/monitored_barrier.h"
#include "sparse_all_reduce.h"

namespace horon::torch_backend {

using c10d::OpType;

namespace {

bool takes_sparse(const horon::Options& options, const at::Tensor& tensor) {
  return options.sparse && tensor.is_sparse() && tensor.is_cpu();
}

}  // namespace

const at::Tensor& HoronBackend::single(const Tensors& tensors, OpKind kind) const {
  TORCH_CHECK_VALUE(tensors.size() == 1, "horon: ", name(kind), ": expected one tensor, got ",
                    tensors.size(), ".");
  return tensors[0];
}

HoronBackend::WorkPtr HoronBackend::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& opts) {
  return issue(builder_.broadcast(single(tensors, OpKind::kBroadcast), opts.rootRank),
               {OpType::BROADCAST, "horon:broadcast", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = single(tensors, OpKind::kAllReduce);
  if (!opts.asyncOp && is_plain_cpu(tensor)) {
    return all_reduce_now(tensor, to_reduction(opts.reduceOp), resolve(opts.timeout));
  }
  if (takes_sparse(options_->engine, tensor)) {
    return allreduce_sparse(tensors, opts);
  }
  return issue(builder_.all_reduce(OpKind::kAllReduce, tensors, to_reduction(opts.reduceOp)),
               {OpType::ALLREDUCE, "horon:all_reduce", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::allreduce_sparse(Tensors& tensors,
                                                     const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = single(tensors, OpKind::kAllReduceSparse);
  if (!takes_sparse(options_->engine, tensor)) {
    return allreduce(tensors, opts);  // whose check says what to do
  }
  return issue(
      sparse_all_reduce(tensor, to_reduction(opts.reduceOp), size_),
      {OpType::_ALLREDUCE_SPARSE, "horon:all_reduce", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return issue(
      builder_.all_reduce(OpKind::kAllReduceCoalesced, tensors, to_reduction(opts.reduceOp)),
      {OpType::ALLREDUCE_COALESCED, "horon:all_reduce", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return issue(
      builder_.reduce(single(tensors, OpKind::kReduce), to_reduction(opts.reduceOp), opts.rootRank),
      {OpType::REDUCE, "horon:reduce", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = single(inputs, OpKind::kAllGather);
  TORCH_CHECK_VALUE(outputs.size() == 1, "horon: all_gather: expected one list of outputs, got ",
                    outputs.size(), ".");
  return issue(builder_.all_gather(outputs[0], input),
               {OpType::ALLGATHER, "horon:all_gather", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& opts) {
  return issue(builder_.all_gather_single(OpKind::kAllGatherSingle, {output}, {input}),
               {OpType::_ALLGATHER_BASE, "horon:all_gather", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::allgather_coalesced(std::vector<Tensors>& outputs,
                                                        Tensors& inputs,
                                                        const c10d::AllgatherOptions& opts) {
  // Deprecated in c10d: outputs[r][i] gets rank r's inputs[i].
  TORCH_CHECK_VALUE(outputs.size() == static_cast<std::size_t>(size_),
                    "horon: all_gather_coalesced: expected ", size_, " lists of outputs, got ",
                    outputs.size(), ".");
  TORCH_CHECK_VALUE(
      !inputs.empty(),
      "horon: all_gather_coalesced: expected at least one tensor, got an empty list.");
  Collective all;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors row;
    for (const Tensors& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "horon: all_gather_coalesced: expected ",
                        inputs.size(), " outputs per rank, got ", list.size(), ".");
      row.push_back(list[i]);
    }
    Collective part = builder_.all_gather(row, inputs[i]);
    all.requests.push_back(std::move(part.requests[0]));
    const auto append = [](auto& to, auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(all.kept_alive, part.kept_alive);
    append(all.copy_in, part.copy_in);
    append(all.copy_back, part.copy_back);
    append(all.inputs, part.inputs);
    append(all.outputs, part.outputs);
    all.device = part.device;
  }
  return issue(std::move(all), {OpType::ALLGATHER_COALESCED, "horon:all_gather",
                                resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return issue(builder_.all_gather_single(OpKind::kAllGatherCoalesced, outputs, inputs),
               {OpType::COALESCED, "horon:all_gather", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& opts) {
  return issue(builder_.gather(outputs.empty() ? Tensors{} : outputs[0],
                               single(inputs, OpKind::kGather), opts.rootRank),
               {OpType::GATHER, "horon:gather", resolve(opts.timeout), opts.asyncOp});
}

#if HORON_HAS_HOOKS
HoronBackend::WorkPtr HoronBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                       const c10d::GatherOptions& opts) {
  return issue(builder_.gather_single(output, input, opts.rootRank),
               {OpType::GATHER, "horon:gather", resolve(opts.timeout), opts.asyncOp});
}
#endif

HoronBackend::WorkPtr HoronBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& opts) {
  return issue(builder_.scatter(single(outputs, OpKind::kScatter),
                                inputs.empty() ? Tensors{} : inputs[0], opts.rootRank),
               {OpType::SCATTER, "horon:scatter", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = single(outputs, OpKind::kReduceScatter);
  TORCH_CHECK_VALUE(inputs.size() == 1, "horon: reduce_scatter: expected one list of inputs, got ",
                    inputs.size(), ".");
  return issue(
      builder_.reduce_scatter(output, inputs[0], to_reduction(opts.reduceOp)),
      {OpType::REDUCE_SCATTER, "horon:reduce_scatter", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& opts) {
  return issue(
      builder_.reduce_scatter_single(OpKind::kReduceScatterSingle, {output}, {input},
                                     to_reduction(opts.reduceOp)),
      {OpType::_REDUCE_SCATTER_BASE, "horon:reduce_scatter", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return issue(builder_.reduce_scatter_single(OpKind::kReduceScatterCoalesced, outputs, inputs,
                                              to_reduction(opts.reduceOp)),
               {OpType::COALESCED, "horon:reduce_scatter", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& opts) {
  return issue(builder_.all_to_all_single(output, input, output_splits, input_splits),
               {OpType::ALLTOALL_BASE, "horon:all_to_all", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& opts) {
  return issue(builder_.all_to_all(outputs, inputs),
               {OpType::ALLTOALL, "horon:all_to_all", resolve(opts.timeout), opts.asyncOp});
}

HoronBackend::WorkPtr HoronBackend::barrier(const c10d::BarrierOptions& opts) {
  const std::chrono::milliseconds timeout = resolve(opts.timeout);
  group_->check_process("barrier");
  // The GPUs, then the hosts meet. Others may have been used without this group.
  const Deadline deadline = Deadline::after(timeout);
  drain_current_streams(opts.device_ids, deadline);
  if (const auto side = group_->device_side()) {
    side->drain(deadline);
  }
  return issue(builder_.barrier(OpKind::kBarrier),
               {OpType::BARRIER, "horon:barrier", timeout, opts.asyncOp});
}

void HoronBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Collective collective = builder_.barrier(OpKind::kMonitoredBarrier);
  collective.requests[0].monitor_all_ranks = wait_all_ranks;
  issue(std::move(collective), {OpType::BARRIER, "horon:monitored_barrier",
                                monitored_barrier_timeout(resolve(opts.timeout), rank_), false});
}

}  // namespace horon::torch_backend
