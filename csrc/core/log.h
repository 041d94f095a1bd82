// One line to stderr, for what a user must know and no exception can carry.
#pragma once

#include <string>

namespace horon {

// Writes "[horon] message" in a single write, so that ranks do not interleave.
void log_warning(const std::string& message);

// The same, unless this process has written one for this cause already.
void log_warning_once(const std::string& cause, const std::string& message);

}  // namespace horon
