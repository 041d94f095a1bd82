// Watching a process of which only a description is known, as long as it has given no descriptor
// (see liveness.h).
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "core/unique_fd.h"

namespace horon {

// Who a process is, for others on its host: a pid alone may be somebody else's by the time it is
// read. Plain data.
struct ProcessIdentity {
  pid_t pid = 0;
  std::uint64_t pid_namespace = 0;  // 0: unknown
  std::uint64_t start_time = 0;     // in clock ticks since the host's boot; 0: unknown

  bool operator==(const ProcessIdentity&) const = default;
};

// This process. What the system does not tell (no /proc, say) stays unknown.
ProcessIdentity own_process();

// Whether a process that was there has ended. One that can not be seen from here (another
// namespace, no pidfd_open) never has, as far as anybody knows.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(const ProcessIdentity& process);

  // Neither blocks. Both are false for one that can not be seen.
  bool has_ended() const;
  bool is_alive() const;

 private:
  bool was_gone_ = false;
  UniqueFd pidfd_;  // empty: can not be seen, or was gone
};

}  // namespace horon
