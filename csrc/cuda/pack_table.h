// What one launch of the pack kernel gets as its parameter: a table of parts, each a contiguous
// range that is copied, scaled or cast from one place to another.
//
// Note [Warps of bytes]
// The parts lie one after another on an axis of grains, 16 bytes of the wider side each. Every
// warp takes the same number of grains, wherever parts begin and end: it finds its first part by a
// binary search and goes on until its grains are used up. So a tensor of 100 MiB keeps as many
// warps busy as it needs, and one warp takes several of 100 bytes. A part begins on a grain, and
// the accesses of 16 bytes never cross one, so no warp divides an access. What a warp takes is what
// its lanes have under way at a time: it waits for memory once, or once for each of a few parts.
// (Blocks that went through their parts one after another took twice the time of a plain copy for
// 64 MiB in skewed sizes: 1 us for each small part, docs/gpu-results.md.)
//
// Note [Kernel parameters]
// The table travels in the kernel's parameters, never in device memory: nothing has to be staged,
// kept until the copy is done, or copied again when a captured graph is replayed. A launch holds
// up to 32,764 bytes (from CUDA 12.1 and compute capability 7.0 on): 1,364 parts. More parts take
// another launch, which is still cheaper than staging a table would be. Parameters are copied at
// each launch, so what fits the classic 4 KiB, 169 parts, uses a kernel that has no more: the 161
// gradients of a ResNet-50 do. That is why a part does not say how long it is, which the next one's
// beginning tells, but for its last grain.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horon {

inline constexpr std::uint32_t kGrainBytes = 16;
inline constexpr std::uint32_t kWarpLanes = 32;
// How many accesses a lane has under way at a time.
inline constexpr std::uint32_t kUnroll = 4;
inline constexpr std::uint32_t kGrainsPerWarp = kUnroll * kWarpLanes;

// From one element type to another, multiplied by a factor on the way. Factor 1 changes nothing.
enum class PackConversion : std::uint8_t {
  kCopy,  // bytes, without a factor
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kFloat32ToFloat16,
  kFloat32ToBFloat16,
  kFloat16ToFloat32,
  kBFloat16ToFloat32,
};

struct PackPart {
  std::uint64_t source;       // address
  std::uint64_t destination;  // address
  std::uint32_t first_grain;  // on the axis of the launch, where the next part begins behind it
  PackConversion conversion;
  // Of the wider side; both sides are aligned for it. One element, or up to 16 bytes.
  std::uint8_t access_bytes;
  // In its last grain, at least one: elements of the conversion's source type; bytes for kCopy.
  std::uint8_t last_elements;
};
static_assert(sizeof(PackPart) == 24, "the table's capacity is computed from this");

struct PackTableHeader {
  double factor;
  std::uint32_t n_parts;
  std::uint32_t n_grains;  // on the whole axis
  // The first ones. Most warps belong to few large parts behind them, and find these at once.
  std::uint32_t n_small;
};

inline constexpr std::size_t kClassicParameterBytes = 4096;
inline constexpr std::size_t kLargeParameterBytes = 32764;

constexpr std::uint32_t parts_in(std::size_t parameter_bytes) {
  return static_cast<std::uint32_t>((parameter_bytes - sizeof(PackTableHeader)) / sizeof(PackPart));
}

inline constexpr std::uint32_t kSmallTableParts = parts_in(kClassicParameterBytes);
inline constexpr std::uint32_t kLargeTableParts = parts_in(kLargeParameterBytes);

template <std::uint32_t kCapacity>
struct PackTable {
  PackTableHeader header;
  PackPart parts[kCapacity];
};
static_assert(sizeof(PackTable<kSmallTableParts>) <= kClassicParameterBytes);
static_assert(sizeof(PackTable<kLargeTableParts>) <= kLargeParameterBytes);

}  // namespace horon
