// Watching other processes: a descriptor that tells when one has ended.
#pragma once

#include <sys/types.h>

#include <string>

#include "core/unique_fd.h"

namespace horon {

// A descriptor that becomes readable (or hangs up) when this process ends, to be given to others: a
// pidfd, or, where pidfd_open is forbidden (logged once), the read end of a pipe whose write end
// this process keeps until it ends. A forked child closes its copy of the write end.
UniqueFd open_own_liveness();

// True when the process behind the descriptor has ended. Does not block.
bool has_ended(int liveness_fd);

// "is stopped (...)" of a process that can not go on by itself, if this one can see that; else
// nothing.
std::string why_it_rests(int liveness_fd);

}  // namespace horon
