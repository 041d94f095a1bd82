// Our threads: names for them, as ps, gdb and py-spy show them, and an error where there is none.
#pragma once

#include <pthread.h>

#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

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

// Throws Error where the system gives none. For threads that nothing goes without.
template <typename Run>
std::thread start_thread(Run&& run) {
  try {
    return std::thread(std::forward<Run>(run));
  } catch (const std::system_error& error) {
    throw Error(concat("the system gives this process no more threads: ", error.what(),
                       " (ulimit -u, or pids.max of its cgroup)"));
  }
}

}  // namespace horon
