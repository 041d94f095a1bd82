// The pack kernel's launches, run on the host: every block and thread, one after another.
#pragma once

#include <vector>

#include "cuda/pack_block.h"
#include "cuda/pack_plan.h"

namespace horon::testing {

inline constexpr std::uint32_t kPackThreads = 256;  // the kernel's

// A launch as the kernel sees it.
struct HostTable {
  PackTableHeader header;
  const std::vector<PackPart>& parts;
};

inline void run_on_host(const std::vector<PackLaunch>& launches) {
  for (const PackLaunch& launch : launches) {
    const HostTable table{launch.header, launch.parts};
    for (std::uint32_t block = 0; block < launch.n_blocks(); ++block) {
      for (std::uint32_t thread = 0; thread < kPackThreads; ++thread) {
        run_pack_thread(table, block, thread, kPackThreads);
      }
    }
  }
}

}  // namespace horon::testing
