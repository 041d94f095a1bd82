// horon's pack kernel (csrc/cuda/pack_kernels.cu): every warp and lane, one after another.
#include <memory>

#include "cuda/pack_lane.h"
#include "kernels.h"

namespace horon::simulator {
namespace {

template <std::uint32_t kCapacity>
std::function<void()> prepare(const Launch& launch) {
  using Table = PackTable<kCapacity>;
  const auto table = std::make_shared<const Table>(launch.argument<Table>(0));
  return [table, n_warps = launch.grid.x * (launch.block.x / kWarpLanes)] {
    for (std::uint32_t warp = 0; warp < n_warps; ++warp) {
      for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
        run_pack_lane(*table, warp, lane);
      }
    }
  };
}

}  // namespace

HostKernel find_pack_kernel(const std::string& name) {
  // void horon::(anonymous namespace)::pack_kernel<253u>(horon::PackTable<253u>)
  if (name.find("horon::") == std::string::npos) {
    return nullptr;
  }
  HostKernel found;
  visit_every_table([&](auto capacity) {
    if (name.find("pack_kernel<" + std::to_string(capacity) + "u>") != std::string::npos) {
      found = prepare<decltype(capacity)::value>;
    }
  });
  return found;
}

}  // namespace horon::simulator
