#include "named/named_options.h"

#include <strings.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "core/options.h"

namespace horon {
namespace {

const char* read(const std::string& name) {
  const char* text = std::getenv(name.c_str());
  return text != nullptr && *text != '\0' ? text : nullptr;
}

// ".0" of "60.0", which Horovod takes as 60.
bool is_fraction(const char* text) {
  return *text == '.' && std::strspn(text + 1, "0") == std::strlen(text + 1);
}

// HORON_<name>, or else HOROVOD_<name>.
std::optional<std::uint64_t> read_number(const char* name, const char* unit) {
  for (const char* prefix : {"HORON_", "HOROVOD_"}) {
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

// The same of a switch, which may also be a word.
std::optional<bool> read_switch(const char* name) {
  for (const char* prefix : {"HORON_", "HOROVOD_"}) {
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
  const auto number = read_number(name, "0 or 1");
  return number ? std::optional(*number != 0) : std::nullopt;
}

struct Knob {
  const char* name;
  const char* why;
};

constexpr Knob kWithoutMeaning[] = {
    {"CYCLE_TIME", "there are no cycles: operations are agreed when they are announced"},
    {"CACHE_CAPACITY", "the number of names that are remembered has no limit"},
    {"CACHE_SPEEDUP", "there is one kind of negotiation"},
    {"AUTOTUNE", "there is nothing to tune"},
    {"HIERARCHICAL_ALLREDUCE", "the transport is chosen by where the ranks are"},
    {"HIERARCHICAL_ALLGATHER", "the transport is chosen by where the ranks are"},
    {"THREAD_AFFINITY", "the background thread sleeps while others wait for results"},
    {"NUM_FINALIZER_THREADS", "there are no finalizer threads"},
    {"DYNAMIC_PROCESS_SETS", "process sets can always be added"},
    {"CPU_OPERATIONS", "there is one implementation"},
    {"CONTROLLER", "there is one implementation"},
    {"NUM_NCCL_STREAMS", "each process set has one stream"},
    {"BATCH_D2D_MEMCOPIES", "the tensors of a batch are always packed by one kernel"},
    {"ENABLE_ASYNC_COMPLETION", "the host never waits for a GPU"},
    {"LOG_LEVEL", "only warnings are written"},
};

}  // namespace

NamedOptions NamedOptions::from_environment() {
  NamedOptions options;
  if (const auto bytes = read_number("FUSION_THRESHOLD", "bytes")) {
    options.fusion.threshold_bytes = *bytes;
  }
  constexpr std::uint64_t kMaxSeconds = std::uint64_t{365} * 24 * 3600;
  if (const auto time = read_number("STALL_CHECK_TIME_SECONDS", "seconds")) {
    options.stall_check = std::chrono::seconds(std::min(*time, kMaxSeconds));
  }
  if (read_switch("STALL_CHECK_DISABLE").value_or(false)) {
    options.stall_check = std::chrono::seconds(0);
  }
  if (const auto time = read_number("STALL_SHUTDOWN_TIME_SECONDS", "seconds")) {
    options.stall_shutdown = std::chrono::seconds(std::min(*time, kMaxSeconds));
  }
  if (const auto is_on = read_switch("JOIN_ALL_OPERATIONS")) {
    options.join_everything = *is_on;
  }
  options.interfaces = network_interfaces_from_environment();
  return options;
}

std::vector<std::string> knobs_without_meaning() {
  std::vector<std::string> lines;
  for (const Knob& knob : kWithoutMeaning) {
    const std::string variable = concat("HOROVOD_", knob.name);
    if (read(variable) != nullptr) {
      lines.push_back(concat(variable, " has no effect: ", knob.why, '.'));
    }
  }
  return lines;
}

}  // namespace horon
