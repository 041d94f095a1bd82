// Tells a forked child apart from the process that made an object.
//
// After fork() a child has the objects but none of the threads, and its descriptors are shared with
// the parent. Using a group there must be an error at once, and destroying one must do nothing.
#pragma once

#include <cstdint>

namespace horon {

// Number of forks between the first process that loaded this library and this one. Cheap: no system
// call. Registers its pthread_atfork handler at first use.
std::uint32_t fork_generation();

}  // namespace horon
