// Names for our threads, as ps, gdb and py-spy show them.
#pragma once

#include <pthread.h>

namespace horon {

namespace detail {
inline thread_local bool is_own_thread = false;
}

// Whether this thread is horon's own: whoever closes what it works for joins it.
inline bool on_own_thread() { return detail::is_own_thread; }

// Once, as the first thing a thread of ours does. At most 15 characters.
inline void name_this_thread(const char* name) {
  ::pthread_setname_np(::pthread_self(), name);
  detail::is_own_thread = true;
}

}  // namespace horon
