// Our threads: names for them, as ps, gdb and py-spy show them, and an error where there is none.
#pragma once

#include <pthread.h>

#include <csignal>

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

// A thread that takes no signals: those are for the program's own threads, which may have blocked
// some, to wait for them or until a better time. Throws std::system_error where the system gives
// none.
template <typename Run>
std::thread quiet_thread(Run&& run) {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
    sigdelset(&all, fault);
  }
  struct Mask {  // which a new thread inherits
    explicit Mask(const sigset_t& blocked) { ::pthread_sigmask(SIG_BLOCK, &blocked, &before); }
    ~Mask() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    Mask(const Mask&) = delete;
    Mask& operator=(const Mask&) = delete;
    sigset_t before{};
  } const mask(all);
  return std::thread(std::forward<Run>(run));
}

// Throws Error where the system gives none. For threads that nothing goes without.
template <typename Run>
std::thread start_thread(Run&& run) {
  try {
    return quiet_thread(std::forward<Run>(run));
  } catch (const std::system_error& error) {
    throw Error(concat("the system gives this process no more threads: ", error.what(),
                       " (ulimit -u, or pids.max of its cgroup)"));
  }
}

}  // namespace horon
