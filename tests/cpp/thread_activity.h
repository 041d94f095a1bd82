// Whether a thread of this process sleeps.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "core/error.h"

namespace horon::testing {

inline long current_thread_id() { return ::syscall(SYS_gettid); }

// How often a thread went to sleep so far; -1 when it does not exist.
inline long voluntary_switches(long thread_id) {
  std::ifstream status(concat("/proc/self/task/", thread_id, "/status"));
  std::string word;
  while (status >> word) {
    if (word == "voluntary_ctxt_switches:") {
      long count = -1;
      status >> count;
      return count;
    }
  }
  return -1;
}

// True when the thread exists and, once it has come to rest (10 s are given), does not wake at all
// within 300 ms.
inline bool comes_to_rest(long thread_id) {
  for (int attempt = 0; attempt < 33; ++attempt) {
    const long before = voluntary_switches(thread_id);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (before >= 0 && voluntary_switches(thread_id) == before) {
      return true;
    }
  }
  return false;
}

}  // namespace horon::testing
