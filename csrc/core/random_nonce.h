// A number that no other process, and no earlier run, has drawn.
#pragma once

#include <cstdint>
#include <random>

namespace horon {

// 64 bits from the operating system.
inline std::uint64_t random_nonce() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

}  // namespace horon
