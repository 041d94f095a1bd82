// What takes the place of shared memory for a rank that shares none with others of its group: what
// waits for words in it waits as within a host.
#pragma once

#include <memory>

#include "core/options.h"
#include "shm/rendezvous.h"

namespace horon {

// `whereabouts` as rendezvous() told them. Throws Error where there is no memory.
std::shared_ptr<SharedGroup> lone_group(const Options& options, const Whereabouts& whereabouts);

}  // namespace horon
