// A rank that others wait for, for messages about that.
#pragma once

#include <cstdint>
#include <string>

namespace horon {

struct LateRank {
  std::string name;        // "rank 1 (pid 4711)"
  std::uint64_t post = 0;  // where its process can be asked, see WatchPost; 0: nowhere
  std::string state;       // what the system says of its process, if that is news: "is stopped"
};

}  // namespace horon
