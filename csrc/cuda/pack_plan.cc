#include "cuda/pack_plan.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "cuda/pack_lane.h"

namespace horon {
namespace {

constexpr std::uint64_t kMaxGrains = std::numeric_limits<std::uint32_t>::max();

struct ElementSizes {
  std::uint64_t source;
  std::uint64_t destination;
};

ElementSizes sizes_of(PackConversion conversion) {
  const std::uint64_t wide = wide_bytes(conversion);
  switch (conversion) {
    case PackConversion::kFloat32ToFloat16:
    case PackConversion::kFloat32ToBFloat16:
      return {4, 2};
    case PackConversion::kFloat16ToFloat32:
    case PackConversion::kBFloat16ToFloat32:
      return {2, 4};
    default:
      return {wide, wide};
  }
}

// What becomes one or more parts.
struct Range {
  std::uint64_t source = 0;       // address
  std::uint64_t destination = 0;  // address
  std::uint64_t elements = 0;     // of the conversion's source type; bytes for kCopy
  PackConversion conversion = PackConversion::kCopy;
  std::uint8_t access_bytes = 0;
};

// Divisions would be most of a plan's time.
bool is_multiple(std::uint64_t address, std::uint64_t power_of_two) {
  return (address & (power_of_two - 1)) == 0;
}

// How one range is accessed: `head` elements one by one, then accesses of `access_bytes`.
struct Alignment {
  std::uint64_t head = 0;
  std::uint64_t access_bytes = 0;
};

// The widest access to which both sides can be aligned by the same head.
Alignment widest_access(const Range& range, const ElementSizes& sizes) {
  const std::uint64_t wide = std::max(sizes.source, sizes.destination);
  for (std::uint64_t access = kGrainBytes; access > wide; access /= 2) {
    const std::uint64_t elements = access / wide;
    for (std::uint64_t head = 0; head < elements; ++head) {
      if (is_multiple(range.source + head * sizes.source, elements * sizes.source) &&
          is_multiple(range.destination + head * sizes.destination, elements * sizes.destination)) {
        return {head, access};
      }
    }
    if (range.conversion != PackConversion::kCopy) {
      break;  // the kernel has only 16 bytes and single elements of these
    }
  }
  return {0, wide};
}

void check_addresses(const Range& range) {
  const ElementSizes sizes = sizes_of(range.conversion);  // 1 for what is copied as bytes
  if (range.source == 0 || range.destination == 0 || !is_multiple(range.source, sizes.source) ||
      !is_multiple(range.destination, sizes.destination)) {
    throw UsageError(concat("pack: ", range.elements, " elements go from address ", range.source,
                            " to ", range.destination, ", expected memory that is aligned to ",
                            sizes.source, " and ", sizes.destination,
                            " bytes. Pass a contiguous copy of the tensor."));
  }
}

class Planner {
 public:
  Planner(std::size_t n_ranges, double factor) : n_ranges_(n_ranges), factor_(factor) {}

  void add(Range range) {
    if (range.elements == 0) {
      return;
    }
    check_addresses(range);
    const ElementSizes sizes = sizes_of(range.conversion);
    const Alignment alignment = widest_access(range, sizes);
    const std::uint64_t head = std::min(alignment.head, range.elements);
    if (head > 0) {
      Range first = range;
      first.elements = head;
      first.access_bytes = static_cast<std::uint8_t>(wide_bytes(range.conversion));
      place(first);
      advance(range, head, sizes);
    }
    range.access_bytes = static_cast<std::uint8_t>(alignment.access_bytes);
    place_divided(range, sizes);
  }

  // What was added so far is small.
  void end_small() {
    for (PackLaunch& launch : launches_) {
      launch.header.n_small = static_cast<std::uint32_t>(launch.parts.size());
    }
  }

  std::vector<PackLaunch> finish() {
    for (PackLaunch& launch : launches_) {
      launch.header.n_parts = static_cast<std::uint32_t>(launch.parts.size());
      launch.header.factor = factor_;
    }
    return std::move(launches_);
  }

 private:
  bool needs_launch() const {
    return launches_.empty() || launches_.back().parts.size() == kLargeTableParts ||
           launches_.back().header.n_grains == kMaxGrains;
  }

  static void advance(Range& range, std::uint64_t elements, const ElementSizes& sizes) {
    range.source += elements * sizes.source;
    range.destination += elements * sizes.destination;
    range.elements -= elements;
  }

  // A range may be longer than what is left of the axis of a launch, or than a whole one.
  void place_divided(Range range, const ElementSizes& sizes) {
    while (range.elements > 0) {
      const std::uint64_t room =
          needs_launch() ? kMaxGrains : kMaxGrains - launches_.back().header.n_grains;
      Range piece = range;
      piece.elements =
          std::min(range.elements, room * std::uint64_t{elements_per_grain(range.conversion)});
      place(piece);
      advance(range, piece.elements, sizes);
    }
  }

  void place(const Range& range) {
    const std::uint64_t per_grain = elements_per_grain(range.conversion);
    const std::uint64_t grains = (range.elements + per_grain - 1) / per_grain;
    if (needs_launch() || launches_.back().header.n_grains + grains > kMaxGrains) {
      launches_.emplace_back().parts.reserve(std::min<std::size_t>(n_ranges_, kLargeTableParts));
    }
    PackLaunch& launch = launches_.back();
    const std::uint64_t last = range.elements - (grains - 1) * per_grain;
    launch.parts.push_back({range.source, range.destination, launch.header.n_grains,
                            range.conversion, range.access_bytes, static_cast<std::uint8_t>(last)});
    launch.header.n_grains += static_cast<std::uint32_t>(grains);
  }

  const std::size_t n_ranges_;
  const double factor_;
  std::vector<PackLaunch> launches_;
};

}  // namespace

PackConversion conversion_between(DType source, DType destination, double factor) {
  using Conversion = PackConversion;
  if (source == destination) {
    if (factor == 1.0) {
      return Conversion::kCopy;
    }
    switch (source) {
      case DType::kFloat16:
        return Conversion::kFloat16;
      case DType::kBFloat16:
        return Conversion::kBFloat16;
      case DType::kFloat32:
        return Conversion::kFloat32;
      case DType::kFloat64:
        return Conversion::kFloat64;
      default:
        throw UsageError(concat("pack: a factor of ", factor, " for a tensor of ", name(source),
                                ", expected float16, bfloat16, float32 or float64. Scale it "
                                "before or after the call."));
    }
  }
  if (source == DType::kFloat32 && destination == DType::kFloat16) {
    return Conversion::kFloat32ToFloat16;
  }
  if (source == DType::kFloat32 && destination == DType::kBFloat16) {
    return Conversion::kFloat32ToBFloat16;
  }
  if (source == DType::kFloat16 && destination == DType::kFloat32) {
    return Conversion::kFloat16ToFloat32;
  }
  if (source == DType::kBFloat16 && destination == DType::kFloat32) {
    return Conversion::kBFloat16ToFloat32;
  }
  throw UsageError(concat("pack: a cast from ", name(source), " to ", name(destination),
                          ", expected one between float32 and float16 or bfloat16."));
}

std::vector<PackLaunch> plan_pack(PackDirection direction, const std::vector<PackTensor>& tensors,
                                  std::uint64_t buffer_address, double factor) {
  Planner planner(tensors.size(), factor);
  const auto add = [&](const PackTensor& tensor) {
    const bool packs = direction == PackDirection::kPack;
    const std::uint64_t in_buffer = buffer_address + tensor.buffer_offset;
    Range range;
    range.conversion = conversion_between(packs ? tensor.dtype : tensor.buffer_dtype,
                                          packs ? tensor.buffer_dtype : tensor.dtype, factor);
    range.source = packs ? tensor.address : in_buffer;
    range.destination = packs ? in_buffer : tensor.address;
    range.elements = tensor.elements *
                     (range.conversion == PackConversion::kCopy ? element_bytes(tensor.dtype) : 1);
    planner.add(range);
  };
  // A warp with several small parts takes longer than others: those begin first.
  const auto is_small = [](const PackTensor& tensor) {
    return tensor.elements * element_bytes(tensor.dtype) <
           std::uint64_t{kGrainsPerWarp} * kGrainBytes;
  };
  const auto add_all = [&](bool small) {
    for (const PackTensor& tensor : tensors) {
      if (is_small(tensor) == small) {
        add(tensor);
      }
    }
  };
  add_all(true);
  planner.end_small();
  add_all(false);
  return planner.finish();
}

std::vector<PackLaunch> plan_copies(const std::vector<ByteCopy>& copies) {
  Planner planner(copies.size(), 1.0);
  for (const ByteCopy& copy : copies) {
    Range range;
    range.conversion = PackConversion::kCopy;
    range.source = copy.source;
    range.destination = copy.destination;
    range.elements = copy.bytes;
    planner.add(range);
  }
  return planner.finish();
}

}  // namespace horon
