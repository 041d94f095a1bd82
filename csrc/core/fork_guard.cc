#include "core/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace horon {
namespace {

std::atomic<std::uint32_t> generation{0};

void count_fork_in_child() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

std::uint32_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork_in_child);
  (void)registered;
  // Relaxed: a fork is ordered with everything that the child does.
  return generation.load(std::memory_order_relaxed);
}

}  // namespace horon
