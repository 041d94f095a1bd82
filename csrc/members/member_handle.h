// How a process tells others, who may never have been in a group with it, that it wants to be a
// member of one: a line of text that travels by whatever way the user has.
#pragma once

#include <cstdint>
#include <string>

#include "shm/process_watch.h"

namespace horon {

// Plain data.
struct MemberHandle {
  int rank = 0;                // in the group as it was when the handle was made
  std::uint64_t instance = 0;  // random: one for each group object of a process
  std::string boot_id;         // of the machine; empty: unknown
  ProcessIdentity process;

  bool operator==(const MemberHandle&) const = default;

  std::string encode() const;
  // Throws UsageError for what is no handle of horon's.
  static MemberHandle decode(const std::string& text);
};

// Of a group object of this process.
MemberHandle own_handle(int rank, std::uint64_t instance);

}  // namespace horon
