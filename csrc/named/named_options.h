// The settings of the engine of named operations.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "named/fusion.h"

namespace horon {

struct NamedOptions {
  FusionOptions fusion;
  // How long a rank waits for the others at a meeting; see Note [Meetings] in named_engine.h. Those
  // that do the same are some tenths of a millisecond apart, on a busy host a millisecond or two;
  // whoever is early would have to wait at the step, too.
  std::chrono::milliseconds meeting_patience{4};
  // How long a transfer may take.
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  // After this time an operation that some ranks have announced and others not is reported on
  // stderr, again and again. 0: never. HORON_STALL_CHECK_TIME_SECONDS, default 60.
  std::chrono::seconds stall_check{60};
  // And after this time it fails. 0: never. HORON_STALL_SHUTDOWN_TIME_SECONDS, default 0.
  std::chrono::seconds stall_shutdown{0};
  // Whether ranks that have joined take part in every kind of operation, with no rows, and not only
  // in reductions, with zeros. Rank 0's counts. HORON_JOIN_ALL_OPERATIONS, default 0.
  bool join_everything = false;

  // Network interfaces ("eth0,eth1") by which ranks of other hosts reach rank 0. Empty: all. Rank
  // 0's counts. HORON_IFACE, or else HOROVOD_GLOO_IFACE, GLOO_SOCKET_IFNAME.
  std::string interfaces;

  // Defaults, overridden by the environment: HORON_ names, or else HOROVOD_ ones. Throws UsageError
  // for values that make no sense.
  static NamedOptions from_environment();
};

// Horovod's knobs that are set in the environment and mean nothing here: a line each, to be told
// once.
std::vector<std::string> knobs_without_meaning();

}  // namespace horon
