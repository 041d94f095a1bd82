#include "core/op_kind.h"

namespace horon {

const char* name(OpKind kind) {
  switch (kind) {
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kMonitoredBarrier:
      return "monitored_barrier";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kAllReduceCoalesced:
      return "all_reduce_coalesced";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kAllGatherSingle:
      return "all_gather_into_tensor";
    case OpKind::kAllGatherCoalesced:
      return "all_gather_into_tensor_coalesced";
    case OpKind::kGather:
      return "gather";
    case OpKind::kGatherSingle:
      return "gather_single";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kReduceScatterSingle:
      return "reduce_scatter_tensor";
    case OpKind::kReduceScatterCoalesced:
      return "reduce_scatter_tensor_coalesced";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kAllToAllSingle:
      return "all_to_all_single";
    case OpKind::kNewWindow:
      return "new_window";
    case OpKind::kNewEmptyWindow:
      return "new_window_without_tensor";
    case OpKind::kWindowRegister:
      return "window.tensor_register";
    case OpKind::kWindowDeregister:
      return "window.tensor_deregister";
    case OpKind::kAllReduceSparse:
      return "all_reduce_of_sparse_tensor";
  }
  return "unknown operation";
}

Pattern pattern(OpKind kind) {
  switch (kind) {
    case OpKind::kBarrier:
    case OpKind::kMonitoredBarrier:
    case OpKind::kNewEmptyWindow:
    case OpKind::kWindowDeregister:
      return Pattern::kNone;
    case OpKind::kAllReduce:
    case OpKind::kAllReduceCoalesced:
      return Pattern::kReduceToAll;
    case OpKind::kReduce:
      return Pattern::kReduceToRoot;
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterSingle:
    case OpKind::kReduceScatterCoalesced:
      return Pattern::kReduceScatter;
    default:
      return Pattern::kExchange;
  }
}

bool has_shared_input(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kAllGather ||
         kind == OpKind::kAllGatherSingle || kind == OpKind::kAllGatherCoalesced ||
         kind == OpKind::kNewWindow || kind == OpKind::kWindowRegister ||
         kind == OpKind::kAllReduceSparse;
}

bool goes_both_ways(OpKind kind, int n_ranks) {
  switch (kind) {
    case OpKind::kAllToAll:
    case OpKind::kAllToAllSingle:
      return true;
    case OpKind::kAllGather:
    case OpKind::kAllGatherSingle:
    case OpKind::kAllGatherCoalesced:
    case OpKind::kAllReduceSparse:
      return n_ranks == 2;
    default:
      return false;
  }
}

bool has_window(OpKind kind) {
  return kind == OpKind::kWindowRegister || kind == OpKind::kWindowDeregister;
}

bool has_root(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kGatherSingle || kind == OpKind::kScatter;
}

bool has_reduction(OpKind kind) {
  const Pattern moves = pattern(kind);
  return moves == Pattern::kReduceToAll || moves == Pattern::kReduceToRoot ||
         moves == Pattern::kReduceScatter;
}

}  // namespace horon
