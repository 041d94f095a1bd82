// Where this process can be asked what it is doing (csrc/watch), and what Python has to say to
// that.
#pragma once

#include <cstdint>

#include "core/watch_door.h"
#include "shm/rendezvous.h"

namespace horon::torch_backend {

// The number of this process's WatchPost, made when it is first called; 0: there is none, because
// HORON_WATCH is off or the system refuses one (logged once). Never ends before the process.
std::uint64_t own_post();

// Where ranks on other hosts can ask the same, from the first call on; nowhere in the same cases.
DoorKey own_door();

// Lets the other ranks of the group know it.
void publish_own_post(const SharedGroup& group);

}  // namespace horon::torch_backend
