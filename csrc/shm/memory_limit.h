// Looks at what the system would let us have, before asking for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace horon {

// Where the system says which cgroups this process is in, and where they are mounted.
struct CgroupFiles {
  std::string membership = "/proc/self/cgroup";
  std::string mount = "/sys/fs/cgroup";
};

// Nothing when `bytes` more of shared memory fit below the limits of the process's cgroup and of
// those above it (version 1 or 2) and into the available memory; otherwise why not. Where the
// system does not say, the answer is nothing.
//
// Reserving pages past a cgroup's limit is a SIGKILL, not an error code: hence the look first.
std::optional<std::string> why_memory_is_short(std::size_t bytes, const CgroupFiles& files = {});

// How much memory this process could have at most: the machine's, or a cgroup's limit. Nothing
// where the system does not say.
std::optional<std::uint64_t> usable_memory_bytes(const CgroupFiles& files = {});

}  // namespace horon
