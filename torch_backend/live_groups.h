// The groups of this process, so that exit can say goodbye for those that nobody destroyed.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group.h"

namespace horon::torch_backend {

// Thread safety: all methods.
class LiveGroups {
 public:
  // The one of this process: groups are made by torch, which has no place for ours to hang on to.
  static LiveGroups& instance();

  void add(const std::shared_ptr<Group>& group);

  // Who of these ranks of the default group has ended, as far as any group knows: see Group.
  // `elsewhere`: other hosts are asked, too, which may take a fifth of a second.
  std::optional<std::string> find_ended(const std::vector<int>& global_ranks, bool elsewhere);

  // Throws PeerLostError, "rank 1 (pid 4711) died before <what>", if one of them has.
  void check_alive(const std::vector<int>& global_ranks, const std::string& what, bool elsewhere);

  // A function that does that. It asks other hosts when it is a second old: most groups are made
  // sooner, and where there are many ranks each would ask all the others.
  static std::function<void()> checker(const std::vector<int>& global_ranks,
                                       const std::string& what);

  // For the end of the process: shuts all groups down, together taking at most `drain` for pending
  // operations. Threads that wait inside an operation are left there.
  void shutdown_all(std::chrono::milliseconds drain);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> groups_;  // guarded by mutex_
};

}  // namespace horon::torch_backend
