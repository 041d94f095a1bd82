// The kinds of collective that ranks must agree on, call by call.
#pragma once

#include <cstdint>

namespace horon {

// List, single-tensor and coalesced forms are separate kinds: a rank that calls all_gather while
// another calls all_gather_into_tensor has a bug, even where the bytes would fit.
enum class OpKind : std::uint8_t {
  kBarrier,
  kMonitoredBarrier,
  kAllReduce,
  kAllReduceCoalesced,
  kBroadcast,
  kReduce,
  kAllGather,
  kAllGatherSingle,
  kAllGatherCoalesced,
  kGather,
  kGatherSingle,
  kScatter,
  kReduceScatter,
  kReduceScatterSingle,
  kReduceScatterCoalesced,
  kAllToAll,
  kAllToAllSingle,
  kNewWindow,       // with a tensor
  kNewEmptyWindow,  // without one: it is registered later
  kWindowRegister,
  kWindowDeregister,
  kAllReduceSparse,  // the transport's part of it: every rank gathers what all have
};

// How the bytes move, whatever the call was named.
enum class Pattern : std::uint8_t {
  kNone,           // barriers and the like: nothing but the arrival phase
  kExchange,       // every (source, destination) pair moves a contiguous range, unreduced
  kReduceToAll,    // all_reduce
  kReduceToRoot,   // reduce
  kReduceScatter,  // every destination reduces what the sources sent it
};

// The torch.distributed name of the call.
const char* name(OpKind kind);

Pattern pattern(OpKind kind);

// True where every destination reads the same data of a source, which is then published once.
bool has_shared_input(OpKind kind);

// Pure. True where each two ranks give each other data that nobody else reads.
bool goes_both_ways(OpKind kind, int n_ranks);

// True where the ranks must mean the same window.
bool has_window(OpKind kind);

// True where a root takes part in the agreement.
bool has_root(OpKind kind);

// True where a reduce op takes part in the agreement.
bool has_reduction(OpKind kind);

}  // namespace horon
