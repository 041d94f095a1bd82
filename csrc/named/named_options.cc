#include "named/named_options.h"

#include "core/environment.h"
#include "core/error.h"
#include "core/options.h"

namespace horon {
namespace {

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
  if (const auto bytes = number_from_environment("FUSION_THRESHOLD", "bytes")) {
    options.fusion.threshold_bytes = *bytes;
  }
  options.stall_check = stall_check_from_environment().value_or(options.stall_check);
  if (const auto time = seconds_from_environment("STALL_SHUTDOWN_TIME_SECONDS")) {
    options.stall_shutdown = *time;
  }
  if (const auto is_on = switch_from_environment("JOIN_ALL_OPERATIONS")) {
    options.join_everything = *is_on;
  }
  (void)watch_from_environment();  // what is wrong with it is said here
  options.interfaces = network_interfaces_from_environment();
  return options;
}

std::vector<std::string> knobs_without_meaning() {
  std::vector<std::string> lines;
  for (const Knob& knob : kWithoutMeaning) {
    const std::string variable = concat("HOROVOD_", knob.name);
    if (is_in_environment(variable)) {
      lines.push_back(concat(variable, " has no effect: ", knob.why, '.'));
    }
  }
  return lines;
}

}  // namespace horon
