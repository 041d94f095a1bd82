// How the ranks of a communicator agree on NCCL's unique id: rank 0 makes it, the store carries it.
#pragma once

#include <string>

#include "core/deadline.h"
#include "core/store.h"
#include "nccl/nccl_api.h"

namespace horon {

// `name` tells the communicators of a store apart (a device pair, the named operations). May be
// called again with the same name, by all ranks: each call is a generation with keys of its own.
// Returns when all ranks have come, so that nobody waits inside NCCL, which may know no deadline,
// for a rank that never comes. Throws TimeoutError at the deadline, which names the ranks that are
// missing, and GroupError on all ranks if rank 0 got no id from NCCL.
NcclUniqueId exchange_unique_id(Store& store, NcclApi& api, int rank, int n_ranks,
                                const std::string& name, const Deadline& deadline);

}  // namespace horon
