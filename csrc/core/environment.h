// Settings of a process: each is HORON_<name>, or else HOROVOD_<name>.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace horon {

// Whether a variable of this whole name says anything.
bool is_in_environment(const std::string& variable);

// All throw UsageError, which names the variable, for what they do not understand.
// `unit`: of what, for the message.
std::optional<std::uint64_t> number_from_environment(const char* name, const char* unit);
// At most a year.
std::optional<std::chrono::seconds> seconds_from_environment(const char* name);
// 0 and 1, or words such as "off" and "on".
std::optional<bool> switch_from_environment(const char* name);

// STALL_CHECK_TIME_SECONDS and STALL_CHECK_DISABLE: how long ranks may wait for others before
// somebody says so. 0: for ever.
std::optional<std::chrono::seconds> stall_check_from_environment();

}  // namespace horon
