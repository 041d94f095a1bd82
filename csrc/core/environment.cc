#include "core/environment.h"

#include <strings.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace horon {
namespace {

constexpr const char* kPrefixes[] = {"HORON_", "HOROVOD_"};

const char* read(const std::string& name) {
  const char* text = std::getenv(name.c_str());
  return text != nullptr && *text != '\0' ? text : nullptr;
}

// ".0" of "60.0", which Horovod takes as 60.
bool is_fraction(const char* text) {
  return *text == '.' && std::strspn(text + 1, "0") == std::strlen(text + 1);
}

}  // namespace

bool is_in_environment(const std::string& variable) { return read(variable) != nullptr; }

std::optional<std::uint64_t> number_from_environment(const char* name, const char* unit) {
  for (const char* prefix : kPrefixes) {
    const std::string variable = concat(prefix, name);
    const char* text = read(variable);
    if (text == nullptr) {
      continue;
    }
    const char* end = text + std::strlen(text);
    std::uint64_t value = 0;
    const auto [rest, error] = std::from_chars(text, end, value);
    if (error != std::errc() || (rest != end && !is_fraction(rest))) {
      throw UsageError(concat(variable, ": expected a number of ", unit, ", got '", text, "'."));
    }
    return value;
  }
  return std::nullopt;
}

std::optional<std::chrono::seconds> seconds_from_environment(const char* name) {
  constexpr std::uint64_t kMostSeconds = std::uint64_t{365} * 24 * 3600;
  const auto number = number_from_environment(name, "seconds");
  return number ? std::optional(std::chrono::seconds(std::min(*number, kMostSeconds)))
                : std::nullopt;
}

std::optional<bool> switch_from_environment(const char* name) {
  for (const char* prefix : kPrefixes) {
    const char* text = read(concat(prefix, name));
    if (text == nullptr) {
      continue;
    }
    for (const char* word : {"true", "on", "yes"}) {
      if (strcasecmp(text, word) == 0) {
        return true;
      }
    }
    for (const char* word : {"false", "off", "no"}) {
      if (strcasecmp(text, word) == 0) {
        return false;
      }
    }
    break;
  }
  const auto number = number_from_environment(name, "0 or 1");
  return number ? std::optional(*number != 0) : std::nullopt;
}

std::optional<std::chrono::seconds> stall_check_from_environment() {
  if (switch_from_environment("STALL_CHECK_DISABLE").value_or(false)) {
    return std::chrono::seconds(0);
  }
  return seconds_from_environment("STALL_CHECK_TIME_SECONDS");
}

}  // namespace horon
