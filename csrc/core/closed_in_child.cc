#include "core/closed_in_child.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace horon {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Registry& registry() {
  static auto* const instance = new Registry;  // outlives whoever forks at exit
  return *instance;
}

// The lock is held across the fork, so that the child finds a whole list.
void lock_before() { registry().mutex.lock(); }
void unlock_in_parent() { registry().mutex.unlock(); }
void close_in_child() {
  for (const int fd : registry().descriptors) {
    ::close(fd);
  }
  registry().descriptors.clear();
  registry().mutex.unlock();
}

}  // namespace

ClosedInChild::ClosedInChild(int fd) : fd_(fd) {
  static const int registered = ::pthread_atfork(lock_before, unlock_in_parent, close_in_child);
  (void)registered;
  const std::lock_guard lock(registry().mutex);
  registry().descriptors.push_back(fd);
}

ClosedInChild::~ClosedInChild() {
  const std::lock_guard lock(registry().mutex);
  const auto found = std::find(registry().descriptors.begin(), registry().descriptors.end(), fd_);
  if (found != registry().descriptors.end()) {
    registry().descriptors.erase(found);
  }
}

}  // namespace horon
