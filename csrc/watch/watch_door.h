// Where ranks on other hosts ask a process what it is doing.
//
// Note [Doors]
// A post (watch_post.h) can only be asked on its own host. A process with a group that spans hosts
// opens a door, too: a TCP port behind which the post's thread sits. Who comes shows the nonce,
// which only ranks of the group know, and may ask for another post of the same host: of a rank that
// the asked one waits for, whose own door the asker need not know. Whoever has no nonce is sent
// away after half a second at most. When a large job waits for one rank, all its hosts may ask at
// once: what was said a second ago is said again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "core/deadline.h"
#include "core/unique_fd.h"
#include "core/watch_door.h"
#include "watch/answer.h"

namespace horon {

struct OpenDoor {
  // What was said there, and when.
  struct Said {
    Clock::time_point at{};
    bool is_late = false;
    std::string message;
  };

  UniqueFd listener;
  DoorKey key;
  std::map<std::uint64_t, Said> said;  // by post; belongs to who answers
};

// Throws Error.
OpenDoor open_door();

// Lets in who has come, if anybody has; whether that one got an answer. `own`: the post behind the
// door; `tell()`: what that says, as encode_answer(). Other posts are asked for it.
bool answer_at(OpenDoor& door, std::uint64_t own, const std::function<std::string()>& tell);

// What the process with that door says, or another one of its host, that with the post (unless that
// is 0). Nothing if it can not be reached.
std::optional<Answer> ask_at(const Door& door, std::uint64_t post, const Deadline& deadline);

}  // namespace horon
