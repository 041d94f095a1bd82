// Where ranks on other hosts ask a process what it is doing.
//
// Note [Doors]
// A post (watch_post.h) can only be asked on its own host. A process with a group that spans hosts
// opens a door, too: a TCP port and a thread that asks the post for whoever comes. Who comes shows
// the nonce, which only ranks of the group know, and may ask for another post of the same host: of
// a rank that the asked one waits for, whose own door the asker need not know. The post's thread
// waits for nobody, so that two doors may ask each other's posts. Whoever shows no nonce is sent
// away after half a second, and keeps nobody else from being heard. When a large job waits for one
// rank, all its hosts may ask at once: what was said a second ago is said again.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/closed_in_child.h"
#include "core/deadline.h"
#include "core/unique_fd.h"
#include "core/watch_door.h"
#include "watch/answer.h"

namespace horon {

// Thread safety: none but that of those who come.
class WatchDoor {
 public:
  // Of the process with that post. Throws Error where the system allows no such socket, or no more
  // threads.
  explicit WatchDoor(std::uint64_t post);
  // In a forked child, which does not have the thread, nothing is awaited.
  ~WatchDoor();
  WatchDoor(const WatchDoor&) = delete;
  WatchDoor& operator=(const WatchDoor&) = delete;

  const DoorKey& key() const { return key_; }

 private:
  struct Guest;
  struct Said {
    Clock::time_point at{};
    bool is_late = false;
    std::string message;
  };

  void serve();
  void let_in(std::vector<Guest>* guests) const;
  // Whether that guest need not be waited for any more.
  bool hear(Guest& guest);
  void answer(const Guest& guest);
  // Null where that post can not be asked here.
  const Said* what_to_say(std::uint64_t post);

  const std::uint32_t fork_generation_;
  const std::uint64_t post_;
  DoorKey key_;
  UniqueFd listener_;
  UniqueFd stop_;                       // an eventfd
  std::map<std::uint64_t, Said> said_;  // by post; belongs to the thread
  std::vector<std::unique_ptr<ClosedInChild>> guards_;
  std::thread thread_;
};

// What the process with that door says, or another one of its host, that with the post (unless that
// is 0). Nothing if it can not be reached.
std::optional<Answer> ask_at(const Door& door, std::uint64_t post, const Deadline& deadline);

// What is said of a process through its door, told to other hosts: names of ranks get the host, and
// doors that lead nowhere from there are left out. Pure.
Answer for_other_hosts(Answer answer, const std::string& host);

enum class DoorState {
  kOpen,     // somebody there knows the nonce
  kRefused,  // nobody listens there
  kUnknown,  // anything else: no answer by the deadline, no way there, a stranger
};

// All are looked at at once.
std::vector<DoorState> look_at(const std::vector<Door>& doors, const Deadline& deadline);

}  // namespace horon
