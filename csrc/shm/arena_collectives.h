// Collectives whose data lies in the ranks' arenas: read where it is, no copies through buffers.
//
// Note [Arena collectives]
// A rank that brings more than travels with its header says in it where in its arena its data
// lies. When all such data can be reached by all ranks, each rank does its share right in the
// others' memory:
// - all_reduce and reduce: the owner of a slice reads it from all n tensors, folds in rank order,
//   and stores the result into every tensor that wants it. With more ranks than cores slices have
//   no owner, and are claimed.
// - everything else: each rank reads from the sources' tensors what is meant for it.
// Then comes one step: nobody returns before all have finished, since until then others read and
// write this rank's tensors. The result has the same bits as the way through buffers.
//
// Data is the source's inputs, one after another in rank order, in one piece: that is how all
// single-tensor forms lie. A rank whose tensors lie otherwise, or overlap, says kNotInArena, and
// all ranks go through the buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "core/header.h"
#include "shm/claims.h"
#include "shm/group_arenas.h"
#include "shm/shared_store.h"

namespace horon {

// What a rank puts into Header::arena_offset: kNotInArena, or kSeesNoArenas, if not an offset.
std::uint64_t arena_offset_of(const Request& request, const GroupArenas& arenas, int rank);

// Whether the operation goes directly between arenas. Pure, the same on all ranks.
bool goes_through_arenas(const std::vector<HeaderView>& headers);

// What the lead of every rank is at least.
std::uint32_t common_lead(const std::vector<HeaderView>& headers);

// This rank's share. Requires goes_through_arenas; a step has to follow on all ranks.
// `factors`: see reduce(). Throws Error when a header makes no sense.
void run_in_arenas(const Request& request, const std::vector<HeaderView>& headers,
                   const GroupArenas& arenas, int rank, const double* factors, SharedStore& store);

// With more ranks than cores, for kinds that are is_reduction_of_whole_tensors(): does what nobody
// else has begun, and returns when all is done. See Note [Claiming]. Requires goes_through_arenas;
// no step has to follow. Throws as Claims::await_all.
void claim_in_arenas(const Request& request, const std::vector<HeaderView>& headers,
                     const GroupArenas& arenas, int rank, const double* factors, SharedStore& store,
                     Claims& claims, const WaitContext& context);
bool is_reduction_of_whole_tensors(OpKind kind);

// After a failure: nobody will use the operation's arena memory again.
void quarantine_tensors(const Request& request, const GroupArenas& arenas);

}  // namespace horon
