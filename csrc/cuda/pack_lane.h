// What one lane of one warp of the pack kernel does. Host and device run this same code, so that
// tests can run every warp and lane against a reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/half_bits.h"
#include "cuda/host_device.h"
#include "cuda/pack_table.h"

namespace horon {

// Bytes of one element.
struct ElementSizes {
  std::uint32_t source;
  std::uint32_t destination;
};

HORON_HOST_DEVICE ElementSizes sizes_of(PackConversion conversion) {
  switch (conversion) {
    case PackConversion::kCopy:
      return {1, 1};
    case PackConversion::kFloat16:
    case PackConversion::kBFloat16:
      return {2, 2};
    case PackConversion::kFloat32:
      return {4, 4};
    case PackConversion::kFloat64:
      return {8, 8};
    case PackConversion::kFloat32ToFloat16:
    case PackConversion::kFloat32ToBFloat16:
      return {4, 2};
    default:
      return {2, 4};
  }
}

HORON_HOST_DEVICE constexpr std::uint32_t wide_bytes(const ElementSizes& sizes) {
  return sizes.source > sizes.destination ? sizes.source : sizes.destination;
}

HORON_HOST_DEVICE std::uint32_t elements_per_warp(PackConversion conversion) {
  return kBytesPerWarp / wide_bytes(sizes_of(conversion));
}

// How wide the accesses of a copy are: as wide as both addresses permit.
HORON_HOST_DEVICE std::uint32_t copy_access_bytes(const PackPart& part) {
  const auto bits = static_cast<std::uint32_t>(part.source | part.destination) | kAccessBytes;
  return bits & (~bits + 1);
}

// Whether a conversion takes as many elements at a time as kAccessBytes of the wider side hold.
HORON_HOST_DEVICE bool has_vectors(const ElementSizes& sizes, const PackPart& part) {
  const std::uint32_t elements = kAccessBytes / wide_bytes(sizes);
  return ((part.source & (elements * sizes.source - 1)) |
          (part.destination & (elements * sizes.destination - 1))) == 0;
}

// What one warp has to do.
struct PackSlice {
  PackPart part;
  std::uint64_t first;  // element of the part
  std::uint32_t count;  // at least one
};

// The last part that begins at or before the warp. Requires that the launch has the warp.
template <class Table>
HORON_HOST_DEVICE std::uint32_t find_part(const Table& table, std::uint32_t warp) {
  if (warp < table.header.n_single) {
    return warp;
  }
  std::uint32_t low = table.header.n_single;
  std::uint32_t high = table.header.n_parts;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (table.entries[middle].first_warp <= warp) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Requires that the launch has the warp.
template <class Table>
HORON_HOST_DEVICE PackSlice slice_of(const Table& table, std::uint32_t warp) {
  const PackTableHeader& header = table.header;
  const std::uint32_t i = find_part(table, warp);
  const std::uint32_t end =
      i + 1 < header.n_parts ? table.entries[i + 1].first_warp : header.n_warps;
  PackSlice slice{};
  slice.part = decode(table.entries[i], header);
  const std::uint32_t per_warp = elements_per_warp(slice.part.conversion);
  slice.first = std::uint64_t{warp - slice.part.first_warp} * per_warp;
  slice.count = warp + 1 == end ? slice.part.last_elements : per_warp;
  return slice;
}

namespace pack {

// Addresses are numbers in the table, because the plan computes with them.
template <class Pointer>
HORON_HOST_DEVICE Pointer memory_at(std::uint64_t address) {
  return reinterpret_cast<Pointer>(address);  // NOLINT(performance-no-int-to-ptr)
}

// What is loaded or stored by one instruction: words, because a vector of smaller elements would be
// taken apart.
template <int kBytes>
struct alignas(kBytes) Access {
  using Word = std::conditional_t<kBytes >= 4, std::uint32_t,
                                  std::conditional_t<kBytes == 2, std::uint16_t, std::uint8_t>>;
  Word words[kBytes / sizeof(Word)];
};

// The same bits as elements. GCC, Clang and nvcc all define what reading the other member gives.
template <class T, int kElements>
union Elements {
  Access<kElements * sizeof(T)> access;
  T elements[kElements];
};

struct CopyOf {
  HORON_HOST_DEVICE std::uint8_t operator()(std::uint8_t value) const { return value; }
};

// Multiplies in float, for double in double, and rounds once, to the destination's type.
struct Scaled {
  double factor;

  HORON_HOST_DEVICE float times(float value) const { return value * static_cast<float>(factor); }
};

template <class Destination>
struct ScaledTo : Scaled {};

template <>
struct ScaledTo<double> : Scaled {
  HORON_HOST_DEVICE double operator()(double value) const { return value * factor; }
};

template <>
struct ScaledTo<float> : Scaled {
  HORON_HOST_DEVICE float operator()(float value) const { return times(value); }
  HORON_HOST_DEVICE float operator()(Float16 value) const { return times(to_float(value)); }
  HORON_HOST_DEVICE float operator()(BFloat16 value) const { return times(to_float(value)); }
};

template <>
struct ScaledTo<Float16> : Scaled {
  HORON_HOST_DEVICE Float16 operator()(float value) const { return to_float16(times(value)); }
  HORON_HOST_DEVICE Float16 operator()(Float16 value) const { return (*this)(to_float(value)); }
};

template <>
struct ScaledTo<BFloat16> : Scaled {
  HORON_HOST_DEVICE BFloat16 operator()(float value) const { return to_bfloat16(times(value)); }
  HORON_HOST_DEVICE BFloat16 operator()(BFloat16 value) const { return (*this)(to_float(value)); }
};

// Lane `lane` of a warp converts its share of `count` elements, kElements at a time.
template <int kElements, class Source, class Destination, class Convert>
HORON_HOST_DEVICE void convert_range(const Source* source, Destination* destination,
                                     std::uint32_t count, Convert convert, std::uint32_t lane) {
  using Load = Access<kElements * sizeof(Source)>;
  using Store = Access<kElements * sizeof(Destination)>;
  const auto* loads = reinterpret_cast<const Load*>(source);
  auto* stores = reinterpret_cast<Store*>(destination);
  const std::uint32_t n_accesses = count / kElements;
  const auto converted = [&convert](const Load loaded) -> Store {
    if constexpr (std::is_same_v<Convert, CopyOf>) {
      return loaded;
    } else {
      Elements<Source, kElements> from{loaded};
      if constexpr (sizeof(Destination) == 2 && kElements > 1) {
        // nvcc stores at most four 16-bit elements at once, but any four words.
        Store store;
        for (int i = 0; i < kElements; i += 2) {
          const std::uint32_t low = convert(from.elements[i]).bits;
          const std::uint32_t high = convert(from.elements[i + 1]).bits;
          store.words[i / 2] = low | high << 16;
        }
        return store;
      } else {
        Elements<Destination, kElements> to;
        for (int i = 0; i < kElements; ++i) {
          to.elements[i] = convert(from.elements[i]);
        }
        return to.access;
      }
    }
  };
  // Once for accesses of 16 bytes. All loads are under way before the first store waits for one.
  for (std::uint32_t at = lane; at < n_accesses; at += kUnroll * kWarpLanes) {
    Load loaded[kUnroll];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (at + i * kWarpLanes < n_accesses) {
        loaded[i] = loads[at + i * kWarpLanes];
      }
    }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (at + i * kWarpLanes < n_accesses) {
        stores[at + i * kWarpLanes] = converted(loaded[i]);
      }
    }
  }
  // What is left of the last part is less than one access.
  const std::uint32_t rest = n_accesses * kElements + lane;
  if (lane < kElements && rest < count) {
    destination[rest] = convert(source[rest]);
  }
}

template <class Source, class Destination, class Convert>
HORON_HOST_DEVICE void convert_slice(const PackSlice& slice, Convert convert, std::uint32_t lane) {
  constexpr ElementSizes kSizes{sizeof(Source), sizeof(Destination)};
  constexpr int kVector = static_cast<int>(kAccessBytes / wide_bytes(kSizes));
  const auto* source = memory_at<const Source*>(slice.part.source) + slice.first;
  auto* destination = memory_at<Destination*>(slice.part.destination) + slice.first;
  if (has_vectors(kSizes, slice.part)) {
    convert_range<kVector>(source, destination, slice.count, convert, lane);
  } else {
    convert_range<1>(source, destination, slice.count, convert, lane);
  }
}

template <int kBytes>
HORON_HOST_DEVICE void copy_slice(const PackSlice& slice, std::uint32_t lane) {
  const auto* source = memory_at<const std::uint8_t*>(slice.part.source) + slice.first;
  auto* destination = memory_at<std::uint8_t*>(slice.part.destination) + slice.first;
  convert_range<kBytes>(source, destination, slice.count, CopyOf{}, lane);
}

HORON_HOST_DEVICE void copy_slice(const PackSlice& slice, std::uint32_t lane) {
  switch (copy_access_bytes(slice.part)) {
    case 16:
      return copy_slice<16>(slice, lane);
    case 8:
      return copy_slice<8>(slice, lane);
    case 4:
      return copy_slice<4>(slice, lane);
    case 2:
      return copy_slice<2>(slice, lane);
    default:
      return copy_slice<1>(slice, lane);
  }
}

HORON_HOST_DEVICE void run_slice(const PackSlice& slice, double factor, std::uint32_t lane) {
  const Scaled by{factor};
  switch (slice.part.conversion) {
    case PackConversion::kCopy:
      return copy_slice(slice, lane);
    case PackConversion::kFloat16:
      return convert_slice<Float16, Float16>(slice, ScaledTo<Float16>{by}, lane);
    case PackConversion::kBFloat16:
      return convert_slice<BFloat16, BFloat16>(slice, ScaledTo<BFloat16>{by}, lane);
    case PackConversion::kFloat32:
      return convert_slice<float, float>(slice, ScaledTo<float>{by}, lane);
    case PackConversion::kFloat64:
      return convert_slice<double, double>(slice, ScaledTo<double>{by}, lane);
    case PackConversion::kFloat32ToFloat16:
      return convert_slice<float, Float16>(slice, ScaledTo<Float16>{by}, lane);
    case PackConversion::kFloat32ToBFloat16:
      return convert_slice<float, BFloat16>(slice, ScaledTo<BFloat16>{by}, lane);
    case PackConversion::kFloat16ToFloat32:
      return convert_slice<Float16, float>(slice, ScaledTo<float>{by}, lane);
    case PackConversion::kBFloat16ToFloat32:
      return convert_slice<BFloat16, float>(slice, ScaledTo<float>{by}, lane);
  }
}

}  // namespace pack

// The whole work of one lane. The last block may have warps that the launch does not.
template <class Table>
HORON_HOST_DEVICE void run_pack_lane(const Table& table, std::uint32_t warp, std::uint32_t lane) {
  if (warp < table.header.n_warps) {
    pack::run_slice(slice_of(table, warp), table.header.factor, lane);
  }
}

}  // namespace horon
