// Where a process can be asked what it is doing, by others of the same user on this host.
//
// A listening socket with an abstract name and a thread that sleeps until somebody connects, and
// then sends one text: what the process waits for, how much it computes, and what `tell` adds.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/closed_in_child.h"
#include "core/deadline.h"
#include "core/unique_fd.h"
#include "watch/answer.h"
#include "watch/watch_door.h"

namespace horon {

// Thread safety: that of open_door() alone, and of ask(), which may come from any process.
class WatchPost {
 public:
  // Called on the post's thread; has to come back by the deadline. May be empty.
  using Tell = std::function<std::string(const Deadline&)>;

  // Throws Error where the system allows no such socket, or no more threads.
  explicit WatchPost(Tell tell);
  // In a forked child, which does not have the thread, nothing is awaited.
  ~WatchPost();
  WatchPost(const WatchPost&) = delete;
  WatchPost& operator=(const WatchPost&) = delete;

  // What others call it; never 0.
  std::uint64_t number() const { return number_; }

  // Lets ranks on other hosts ask, too, from now on; the same each time. Throws Error where the
  // system allows no such socket. Thread-safe.
  DoorKey open_door();

 private:
  void serve();
  void let_in() const;
  std::string tell() const;

  const std::uint32_t fork_generation_;
  const Tell tell_;
  std::uint64_t number_ = 0;
  UniqueFd listener_;
  UniqueFd stop_;  // an eventfd
  std::mutex door_mutex_;
  std::unique_ptr<WatchDoor> door_;  // guarded by door_mutex_
  std::vector<std::unique_ptr<ClosedInChild>> guards_;
  std::thread thread_;
};

// What the process with that post says; nothing if it can not be reached, or is another user's.
std::optional<Answer> ask(std::uint64_t post, const Deadline& deadline);

// The posts of this user's processes that can be reached from here (one network namespace).
std::vector<std::uint64_t> find_watch_posts();

}  // namespace horon
