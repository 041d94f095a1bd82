// What one thread of the pack kernel does. Host and device run this same code, so that tests can
// run every block and thread against a reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/half_bits.h"
#include "cuda/host_device.h"
#include "cuda/pack_table.h"

namespace horon {

// Elements [first, last) of a part, which one block has to do.
struct PackSlice {
  std::uint64_t first;
  std::uint64_t last;
};

// Bytes of one element on the wider side.
HORON_HOST_DEVICE std::uint32_t wide_bytes(PackConversion conversion) {
  switch (conversion) {
    case PackConversion::kCopy:
      return 1;
    case PackConversion::kFloat16:
    case PackConversion::kBFloat16:
      return 2;
    case PackConversion::kFloat64:
      return 8;
    default:
      return 4;
  }
}

HORON_HOST_DEVICE std::uint32_t elements_per_grain(PackConversion conversion) {
  return kGrainBytes / wide_bytes(conversion);
}

// How long part `i` is, in elements.
template <class Table>
HORON_HOST_DEVICE std::uint64_t elements_of(const Table& table, std::uint32_t i) {
  const PackPart& part = table.parts[i];
  const std::uint32_t end =
      i + 1 < table.header.n_parts ? table.parts[i + 1].first_grain : table.header.n_grains;
  return std::uint64_t{end - part.first_grain - 1} * elements_per_grain(part.conversion) +
         part.last_elements;
}

// The last part that begins at or before the grain. Requires that the first one begins at 0.
template <class Table>
HORON_HOST_DEVICE std::uint32_t find_part(const Table& table, std::uint32_t grain) {
  std::uint32_t low = 0;
  std::uint32_t high = table.header.n_parts;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (table.parts[middle].first_grain <= grain) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The elements of a part of `elements` that lie in grains [begin, end) of the axis.
HORON_HOST_DEVICE PackSlice slice_of(const PackPart& part, std::uint64_t elements,
                                     std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t per_grain = elements_per_grain(part.conversion);
  const std::uint64_t from = begin > part.first_grain ? begin - part.first_grain : 0;
  const std::uint64_t to = end > part.first_grain ? end - part.first_grain : 0;
  const std::uint64_t first = from * per_grain;
  const std::uint64_t last = to * per_grain;
  return {first < elements ? first : elements, last < elements ? last : elements};
}

// Calls visit(part, slice) for everything that block `block` has to do, in the order of the axis.
template <class Table, class Visit>
HORON_HOST_DEVICE void for_each_slice(const Table& table, std::uint64_t block, Visit&& visit) {
  const std::uint64_t begin = block * table.header.grains_per_block;
  const std::uint64_t end_of_block = begin + table.header.grains_per_block;
  const std::uint64_t end =
      end_of_block < table.header.n_grains ? end_of_block : table.header.n_grains;
  if (begin >= end) {
    return;
  }
  for (std::uint32_t i = find_part(table, static_cast<std::uint32_t>(begin));
       i < table.header.n_parts && table.parts[i].first_grain < end; ++i) {
    const PackSlice slice = slice_of(table.parts[i], elements_of(table, i), begin, end);
    if (slice.first < slice.last) {
      visit(table.parts[i], slice);
    }
  }
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

// How many accesses a thread has under way at a time.
inline constexpr int kUnroll = 4;

// Thread `thread` of `n_threads` converts its share of `count` elements, kElements at a time.
template <int kElements, class Source, class Destination, class Convert>
HORON_HOST_DEVICE void convert_range(const Source* source, Destination* destination,
                                     std::uint64_t count, Convert convert, std::uint32_t thread,
                                     std::uint32_t n_threads) {
  using Load = Access<kElements * sizeof(Source)>;
  using Store = Access<kElements * sizeof(Destination)>;
  const auto* loads = reinterpret_cast<const Load*>(source);
  auto* stores = reinterpret_cast<Store*>(destination);
  const std::uint64_t n_accesses = count / kElements;
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
  std::uint64_t at = thread;
  for (; at + std::uint64_t{kUnroll - 1} * n_threads < n_accesses;
       at += std::uint64_t{kUnroll} * n_threads) {
    Load loaded[kUnroll];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < kUnroll; ++i) {
      loaded[i] = loads[at + static_cast<std::uint64_t>(i) * n_threads];
    }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < kUnroll; ++i) {
      stores[at + static_cast<std::uint64_t>(i) * n_threads] = converted(loaded[i]);
    }
  }
  for (; at < n_accesses; at += n_threads) {
    stores[at] = converted(loads[at]);
  }
  // What is left of the last part is less than one access.
  const std::uint64_t rest = n_accesses * kElements + thread;
  if (thread < kElements && rest < count) {
    destination[rest] = convert(source[rest]);
  }
}

template <class Source, class Destination, class Convert>
HORON_HOST_DEVICE void convert_slice(const PackPart& part, const PackSlice& slice, Convert convert,
                                     std::uint32_t thread, std::uint32_t n_threads) {
  constexpr int kWide =
      static_cast<int>(sizeof(Source) > sizeof(Destination) ? sizeof(Source) : sizeof(Destination));
  constexpr int kVector = static_cast<int>(kGrainBytes) / kWide;
  const auto* source = memory_at<const Source*>(part.source) + slice.first;
  auto* destination = memory_at<Destination*>(part.destination) + slice.first;
  const std::uint64_t count = slice.last - slice.first;
  if (part.access_bytes == kGrainBytes) {
    convert_range<kVector>(source, destination, count, convert, thread, n_threads);
  } else {
    convert_range<1>(source, destination, count, convert, thread, n_threads);
  }
}

template <int kBytes>
HORON_HOST_DEVICE void copy_slice(const PackPart& part, const PackSlice& slice,
                                  std::uint32_t thread, std::uint32_t n_threads) {
  const auto* source = memory_at<const std::uint8_t*>(part.source) + slice.first;
  auto* destination = memory_at<std::uint8_t*>(part.destination) + slice.first;
  convert_range<kBytes>(source, destination, slice.last - slice.first, CopyOf{}, thread, n_threads);
}

HORON_HOST_DEVICE void copy_slice(const PackPart& part, const PackSlice& slice,
                                  std::uint32_t thread, std::uint32_t n_threads) {
  switch (part.access_bytes) {
    case 16:
      return copy_slice<16>(part, slice, thread, n_threads);
    case 8:
      return copy_slice<8>(part, slice, thread, n_threads);
    case 4:
      return copy_slice<4>(part, slice, thread, n_threads);
    case 2:
      return copy_slice<2>(part, slice, thread, n_threads);
    default:
      return copy_slice<1>(part, slice, thread, n_threads);
  }
}

HORON_HOST_DEVICE void run_slice(const PackPart& part, const PackSlice& slice, double factor,
                                 std::uint32_t thread, std::uint32_t n_threads) {
  const Scaled by{factor};
  switch (part.conversion) {
    case PackConversion::kCopy:
      return copy_slice(part, slice, thread, n_threads);
    case PackConversion::kFloat16:
      return convert_slice<Float16, Float16>(part, slice, ScaledTo<Float16>{by}, thread, n_threads);
    case PackConversion::kBFloat16:
      return convert_slice<BFloat16, BFloat16>(part, slice, ScaledTo<BFloat16>{by}, thread,
                                               n_threads);
    case PackConversion::kFloat32:
      return convert_slice<float, float>(part, slice, ScaledTo<float>{by}, thread, n_threads);
    case PackConversion::kFloat64:
      return convert_slice<double, double>(part, slice, ScaledTo<double>{by}, thread, n_threads);
    case PackConversion::kFloat32ToFloat16:
      return convert_slice<float, Float16>(part, slice, ScaledTo<Float16>{by}, thread, n_threads);
    case PackConversion::kFloat32ToBFloat16:
      return convert_slice<float, BFloat16>(part, slice, ScaledTo<BFloat16>{by}, thread, n_threads);
    case PackConversion::kFloat16ToFloat32:
      return convert_slice<Float16, float>(part, slice, ScaledTo<float>{by}, thread, n_threads);
    case PackConversion::kBFloat16ToFloat32:
      return convert_slice<BFloat16, float>(part, slice, ScaledTo<float>{by}, thread, n_threads);
  }
}

}  // namespace pack

// How many threads a slice gives something to do, in whole warps.
HORON_HOST_DEVICE std::uint32_t threads_for(const PackPart& part, const PackSlice& slice,
                                            std::uint32_t n_threads) {
  constexpr std::uint32_t kWarp = 32;
  const std::uint64_t bytes = (slice.last - slice.first) * wide_bytes(part.conversion);
  if (bytes >= std::uint64_t{n_threads} * kGrainBytes) {
    return n_threads;  // without a division
  }
  const std::uint32_t accesses =
      (static_cast<std::uint32_t>(bytes) + part.access_bytes - 1) / part.access_bytes;
  return accesses < n_threads ? (accesses + kWarp - 1) / kWarp * kWarp : n_threads;
}

// The whole work of one thread.
//
// Note [Small parts side by side]
// A part of 1 KiB is work for two warps, which wait for memory once, and a block may have dozens of
// such parts. Each begins with the warps behind those of the part before, so that all warps of the
// block have some, and wait at the same time.
template <class Table>
HORON_HOST_DEVICE void run_pack_thread(const Table& table, std::uint32_t block,
                                       std::uint32_t thread, std::uint32_t n_threads) {
  const double factor = table.header.factor;
  std::uint32_t turned = thread;  // the thread's number among those of the part
  for_each_slice(table, block, [&](const PackPart& part, const PackSlice& slice) {
    pack::run_slice(part, slice, factor, turned, n_threads);
    const std::uint32_t used = threads_for(part, slice, n_threads);
    turned += turned < used ? n_threads - used : 0U - used;
  });
}

}  // namespace horon
