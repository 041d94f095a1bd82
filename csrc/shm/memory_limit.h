// Looks at what the system would let us have, before asking for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace horon {

// Nothing when `bytes` more of shared memory fit below the cgroup's limit and into the available
// memory; otherwise why not. Where the system does not say, the answer is nothing.
//
// Reserving pages past a cgroup's limit is a SIGKILL, not an error code: hence the look first.
std::optional<std::string> why_memory_is_short(std::size_t bytes);

// How much memory this process could have at most: the machine's, or a cgroup's limit. Nothing
// where the system does not say.
std::optional<std::uint64_t> usable_memory_bytes();

}  // namespace horon
