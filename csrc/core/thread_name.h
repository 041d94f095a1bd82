// Names for our threads, as ps, gdb and py-spy show them.
#pragma once

#include <pthread.h>

namespace horon {

// At most 15 characters.
inline void name_this_thread(const char* name) { ::pthread_setname_np(::pthread_self(), name); }

}  // namespace horon
