// What one launch of the pack kernel gets as its parameter: a table of parts, each a contiguous
// range that is copied, scaled or cast from one place to another.
//
// Note [Warps of bytes]
// A part gets as many warps as it needs, 2 KiB of its wider side each: what a warp's lanes have
// under way at a time, so that a warp waits for memory once. A tensor of 100 MiB keeps as many
// warps busy as it needs, and no warp takes one small tensor after another. Parts of a single warp
// lie first: warp `i` has part `i`, without a search; the warps of larger ones search among few.
// (Blocks that went through several parts took 1 us for each small one, and a search among all
// parts 1.4 us of a launch: docs/gpu-results.md.)
//
// Note [Kernel parameters]
// The table travels in the kernel's parameters, never in device memory: nothing has to be staged,
// kept until the copy is done, or copied again when a captured graph is replayed. A launch holds
// up to 32,764 bytes (from CUDA 12.1 and compute capability 7.0 on): 2,044 parts. More parts take
// another launch, which is still cheaper than staging a table would be. All of a kernel's
// parameters are loaded before it begins, used or not: 3.2 us pass from a launch of 4 KiB to the
// next one, 5.4 of 32. So there are kernels for tables of several sizes, and a part takes 16 bytes:
// its addresses are distances from those of the launch's first part, within half a TiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "cuda/host_device.h"

namespace horon {

inline constexpr std::uint32_t kAccessBytes = 16;  // the widest
inline constexpr std::uint32_t kWarpLanes = 32;
// How many accesses a lane has under way at a time.
inline constexpr std::uint32_t kUnroll = 4;
// Of the wider side.
inline constexpr std::uint32_t kBytesPerWarp = kUnroll * kWarpLanes * kAccessBytes;

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
  std::uint32_t first_warp;   // of the launch; behind it those of the next part
  // For its last warp, at least one: elements of the conversion's source type; bytes for kCopy.
  std::uint32_t last_elements;
  PackConversion conversion;
};

struct PackTableHeader {
  double factor;
  // Half a window before the first part's addresses, modulo 2^64.
  std::uint64_t source_base;
  std::uint64_t destination_base;
  std::uint32_t n_parts;
  std::uint32_t n_single;  // of the first parts, each has a single warp
  std::uint32_t n_warps;
};

// A part as it lies in the table.
struct alignas(16) PackEntry {
  std::uint32_t first_warp;
  std::uint32_t source_low;
  std::uint32_t destination_low;
  std::uint32_t rest;  // high bits of both, last_elements - 1, conversion

  static constexpr int kHighBits = 8;  // of a distance, above the low 32
  static constexpr int kLastBits = 12;
  static constexpr int kDestinationShift = kHighBits;
  static constexpr int kLastShift = kDestinationShift + kHighBits;
  static constexpr int kConversionShift = kLastShift + kLastBits;
};
static_assert(sizeof(PackEntry) == 16, "the table's capacity is computed from this");
static_assert(kBytesPerWarp <= 1U << PackEntry::kLastBits);

// Distances from a base that an entry holds.
inline constexpr std::uint64_t kPackWindow = std::uint64_t{1} << (32 + PackEntry::kHighBits);

// Requires that both addresses are less than a window from the header's bases.
inline PackEntry encode(const PackPart& part, const PackTableHeader& header) {
  const std::uint64_t source = part.source - header.source_base;
  const std::uint64_t destination = part.destination - header.destination_base;
  PackEntry entry{};
  entry.first_warp = part.first_warp;
  entry.source_low = static_cast<std::uint32_t>(source);
  entry.destination_low = static_cast<std::uint32_t>(destination);
  entry.rest = static_cast<std::uint32_t>(source >> 32) |
               static_cast<std::uint32_t>(destination >> 32) << PackEntry::kDestinationShift |
               (part.last_elements - 1) << PackEntry::kLastShift |
               static_cast<std::uint32_t>(part.conversion) << PackEntry::kConversionShift;
  return entry;
}

HORON_HOST_DEVICE PackPart decode(const PackEntry& entry, const PackTableHeader& header) {
  constexpr std::uint32_t kHighMask = (1U << PackEntry::kHighBits) - 1;
  constexpr std::uint32_t kLastMask = (1U << PackEntry::kLastBits) - 1;
  const std::uint32_t rest = entry.rest;
  const std::uint64_t source_high = rest & kHighMask;
  const std::uint64_t destination_high = rest >> PackEntry::kDestinationShift & kHighMask;
  PackPart part{};
  part.source = header.source_base + (source_high << 32 | entry.source_low);
  part.destination = header.destination_base + (destination_high << 32 | entry.destination_low);
  part.first_warp = entry.first_warp;
  part.last_elements = (rest >> PackEntry::kLastShift & kLastMask) + 1;
  part.conversion = static_cast<PackConversion>(rest >> PackEntry::kConversionShift);
  return part;
}

template <std::uint32_t kCapacity>
struct PackTable {
  PackTableHeader header;
  PackEntry entries[kCapacity];
};

constexpr std::uint32_t parts_in(std::size_t table_bytes) {
  return static_cast<std::uint32_t>((table_bytes - sizeof(PackTable<1>)) / sizeof(PackEntry)) + 1;
}

// How many parts the tables of the kernels hold. The first is CUDA's classic 4 KiB.
inline constexpr std::uint32_t kTableParts[] = {parts_in(4096), parts_in(8192), parts_in(12288),
                                                parts_in(20480), parts_in(32764)};
inline constexpr std::size_t kTables = std::size(kTableParts);
inline constexpr std::uint32_t kMaxTableParts = kTableParts[kTables - 1];
static_assert(sizeof(PackTable<kTableParts[0]>) <= 4096);
static_assert(sizeof(PackTable<kMaxTableParts>) <= 32764);

template <std::size_t kTable>
using TableParts = std::integral_constant<std::uint32_t, kTableParts[kTable]>;

// Calls visit(TableParts<...>) for the smallest table, from kTable on, that holds all parts.
template <std::size_t kTable = 0, class Visit>
void visit_smallest_table(std::size_t n_parts, const Visit& visit) {
  if constexpr (kTable + 1 < kTables) {
    if (n_parts > kTableParts[kTable]) {
      return visit_smallest_table<kTable + 1>(n_parts, visit);
    }
  }
  visit(TableParts<kTable>());
}

template <std::size_t kTable = 0, class Visit>
void visit_every_table(const Visit& visit) {
  visit(TableParts<kTable>());
  if constexpr (kTable + 1 < kTables) {
    visit_every_table<kTable + 1>(visit);
  }
}

}  // namespace horon
