// What the environment asks of the simulator. Read once, when first needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace horon::simulator {

struct Settings {
  // HORON_SIMULATOR_DEVICES (1), less those that CUDA_VISIBLE_DEVICES hides: the numbers of those
  // left.
  std::vector<int> visible_devices;
  // HORON_SIMULATOR_MEMORY_MB (8192): of each device.
  std::size_t memory_bytes;
  // HORON_SIMULATOR_DELAY_US (0): each queue entry begins up to this much late, at random.
  std::uint64_t max_delay_us;
  // HORON_SIMULATOR_SEED: of all that is random; else another one in each process.
  std::uint64_t seed;
  // HORON_SIMULATOR_IGNORE_KERNELS=1: a kernel that is not known does nothing, instead of ending
  // the process.
  bool ignores_kernels;
  // HORON_SIMULATOR_REMOTE_ERROR=1: a peer that died is an ncclRemoteError, as over a network.
  bool reports_remote_errors;
};

const Settings& settings();

}  // namespace horon::simulator
