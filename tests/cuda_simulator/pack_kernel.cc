// horon's pack kernel (csrc/cuda/pack_kernels.cu): every block and thread, one after another.
#include <memory>

#include "cuda/pack_block.h"
#include "kernels.h"

namespace horon::simulator {
namespace {

template <std::uint32_t kCapacity>
std::function<void()> prepare(const Launch& launch) {
  using Table = PackTable<kCapacity>;
  const auto table = std::make_shared<const Table>(launch.argument<Table>(0));
  return [table, n_blocks = launch.grid.x, n_threads = launch.block.x] {
    for (std::uint32_t block = 0; block < n_blocks; ++block) {
      for (std::uint32_t thread = 0; thread < n_threads; ++thread) {
        run_pack_thread(*table, block, thread, n_threads);
      }
    }
  };
}

}  // namespace

HostKernel find_pack_kernel(const std::string& name) {
  // void horon::(anonymous namespace)::pack_kernel<169u>(horon::PackTable<169u>)
  const auto has = [&name](std::uint32_t capacity) {
    return name.find("horon::") != std::string::npos &&
           name.find("pack_kernel<" + std::to_string(capacity) + "u>") != std::string::npos;
  };
  if (has(kSmallTableParts)) {
    return prepare<kSmallTableParts>;
  }
  if (has(kLargeTableParts)) {
    return prepare<kLargeTableParts>;
  }
  return nullptr;
}

}  // namespace horon::simulator
