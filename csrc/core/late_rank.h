// A rank that others wait for, for messages about that.
#pragma once

#include <cstdint>
#include <string>

#include "core/watch_door.h"

namespace horon {

struct LateRank {
  std::string name;        // "rank 1 (pid 4711)"
  std::uint64_t post = 0;  // where its process can be asked, see WatchPost; 0: nowhere, or behind
  std::string state;       // what the system says of its process, if that is news: "is stopped"
  Door door = {};          // of its process, or of one on its host that knows the post
};

}  // namespace horon
