// How scratch memory on a GPU is divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/round_up.h"

namespace horon {

// So that each part of it is aligned for any access.
inline constexpr std::size_t kScratchAlignment = 256;

// Pure. What a part of so many bytes takes.
constexpr std::size_t scratch_room(std::size_t bytes) { return round_up(bytes, kScratchAlignment); }

// As kernels are told of it.
inline std::uint64_t address_of(const std::byte* memory) {
  return reinterpret_cast<std::uint64_t>(memory);
}

}  // namespace horon
