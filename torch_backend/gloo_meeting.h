// How the ranks of a Gloo group find each other, and hear of one that can not make it.
//
// Gloo waits in the store for the addresses of all ranks. A rank where it fails (no descriptors, no
// threads, no interface) leaves a note there, so that the others need not wait for their timeout,
// and can say why.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "compat.h"
#include "core/deadline.h"
#include "gloo_maker.h"

namespace horon::torch_backend {

// Calls `make_gloo` with a store of its own below `store`. `attempt`: how often this rank has tried
// to make a group of this name, the same on all ranks. `look_around` is called about every second
// while Gloo waits there; throws to give up. Blocks until all ranks have come, at most until the
// deadline; while Gloo connects, nobody looks around. Throws GroupError, which names the rank where
// it failed if that is known: as `number`, unless that is negative.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int n_ranks, std::int64_t attempt,
                                                  const GlooMaker& make_gloo,
                                                  const Deadline& deadline,
                                                  std::function<void()> look_around,
                                                  int number = -1);

}  // namespace horon::torch_backend
