// The pack kernel's launches, run on the host: every warp and lane, one after another.
#pragma once

#include <vector>

#include "cuda/pack_lane.h"
#include "cuda/pack_plan.h"

namespace horon::testing {

// A launch as the kernel sees it.
struct HostTable {
  PackTableHeader header;
  const std::vector<PackEntry>& entries;
};

inline std::vector<PackPart> parts_of(const PackLaunch& launch) {
  std::vector<PackPart> parts;
  for (const PackEntry& entry : launch.entries) {
    parts.push_back(decode(entry, launch.header));
  }
  return parts;
}

inline void run_on_host(const std::vector<PackLaunch>& launches) {
  for (const PackLaunch& launch : launches) {
    const HostTable table{launch.header, launch.entries};
    for (std::uint32_t warp = 0; warp < launch.header.n_warps; ++warp) {
      for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
        run_pack_lane(table, warp, lane);
      }
    }
  }
}

}  // namespace horon::testing
