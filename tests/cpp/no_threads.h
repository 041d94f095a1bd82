// A system that gives no thread. For children alone (in_child.h), and not under sanitizers, which
// need the address space that is taken away.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <system_error>
#include <thread>

namespace horon::testing {

// From now on there is no room for the stack of one more. Threads that wait for ever take the
// stacks that ended ones have left. False if that could not be had.
inline bool take_threads_away() {
  std::ifstream in("/proc/self/statm");
  std::size_t pages = 0;
  in >> pages;
  const rlimit limit{pages * 4096 + (1 << 20), RLIM_INFINITY};
  if (::setrlimit(RLIMIT_AS, &limit) != 0) {
    return false;
  }
  for (int i = 0; i < 100; ++i) {
    try {
      std::thread([] { ::pause(); }).detach();
    } catch (const std::system_error&) {
      return true;
    }
  }
  return false;
}

}  // namespace horon::testing
