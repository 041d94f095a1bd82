// Which machine this is, for those who want to know whether they are on one.
#pragma once

#include <string>

namespace horon {

inline constexpr const char* kBootIdFile = "/proc/sys/kernel/random/boot_id";

// New with every start of the machine, and the same for all its containers. Empty: unknown.
std::string boot_id();

}  // namespace horon
