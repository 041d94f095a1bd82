// Who belongs to a group whose members change, and which of them is which rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "members/member_handle.h"
#include "shm/process_watch.h"

namespace horon {

// Plain data. The same on all members.
struct Membership {
  std::vector<MemberHandle> members;  // by rank
  int rank = 0;                       // this process's
  // Differs, all but surely, where the members or their order do.
  std::uint64_t digest = 0;
};

inline const MemberHandle& own_member(const Membership& membership) {
  return membership.members[static_cast<std::size_t>(membership.rank)];
}

// Pure. Where the order is not given, ranks keep the order that they had, and those who had the
// same rank are in the order of their instances. `own`: the instance of the group that asks.
// Throws UsageError: no handle, something that is none, one that comes twice, the own one missing.
Membership plan_membership(const std::vector<std::string>& handles, bool is_order_given,
                           std::uint64_t own);

// Whether members have ended that may never have come to where they are waited for. Those on other
// machines, or in another PID namespace, can not be seen.
class MemberWatch {
 public:
  explicit MemberWatch(const Membership& membership);

  // Throws PeerLostError, naming them: "rank 1 (pid 4711) has ended before ...".
  void check(const char* before_what) const;

 private:
  struct Watched {
    int rank;
    pid_t pid;
    ProcessWatch watch;
  };
  std::vector<Watched> watched_;
};

}  // namespace horon
