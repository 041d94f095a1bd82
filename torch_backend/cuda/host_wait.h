// A wait of the host with a limit, which CUDA does not have: Work::wait(timeout), barriers.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "core/deadline.h"
#include "core/function_ref.h"
#include "interrupt.h"
#include "process_exit.h"

namespace horon::torch_backend {

// Looks again and again, with pauses; false at the limit. Throws what Ctrl-C raises.
inline bool ends_within(FunctionRef<bool()> has_ended, const Deadline& give_up) {
  constexpr std::chrono::microseconds kLongestPause{1000};
  std::chrono::microseconds pause{20};
  while (!has_ended()) {
    if (give_up.has_passed()) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
    if (const auto* check_interrupt = interrupt_check()) {
      (*check_interrupt)();
    }
  }
  stay_if_process_exits();
  return true;
}

// Throws DistBackendError at the limit.
inline void await_on_host(FunctionRef<bool()> has_ended, std::chrono::milliseconds timeout,
                          const std::string& operation) {
  if (!ends_within(has_ended, Deadline::after(timeout))) {
    C10_THROW_ERROR(DistBackendError, "horon: wait(timeout): Timed out waiting " +
                                          std::to_string(timeout.count()) + "ms for " + operation +
                                          ", which goes on; wait again, or abort the group.");
  }
}

}  // namespace horon::torch_backend
