#include "cuda/pack_plan.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/pack_lane.h"

namespace horon {
namespace {

// What becomes one or more parts.
struct Range {
  std::uint64_t source = 0;       // address
  std::uint64_t destination = 0;  // address
  std::uint64_t elements = 0;     // of the conversion's source type; bytes for kCopy
  PackConversion conversion = PackConversion::kCopy;
};

// Divisions would be most of a plan's time.
bool is_multiple(std::uint64_t address, std::uint64_t power_of_two) {
  return (address & (power_of_two - 1)) == 0;
}

// How many elements are done one by one, so that the accesses of the rest are the widest to which
// both sides can be aligned.
std::uint64_t head_of(const Range& range, const ElementSizes& sizes) {
  const std::uint64_t wide = wide_bytes(sizes);
  for (std::uint64_t access = kAccessBytes; access > wide; access /= 2) {
    const std::uint64_t elements = access / wide;
    for (std::uint64_t head = 0; head < elements; ++head) {
      if (is_multiple(range.source + head * sizes.source, elements * sizes.source) &&
          is_multiple(range.destination + head * sizes.destination, elements * sizes.destination)) {
        return head;
      }
    }
    if (range.conversion != PackConversion::kCopy) {
      break;  // the kernel has only vectors and single elements of these
    }
  }
  return 0;
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
    const std::uint64_t head = std::min(head_of(range, sizes), range.elements);
    if (head > 0) {
      Range first = range;
      first.elements = head;
      place(first);
      range.source += head * sizes.source;
      range.destination += head * sizes.destination;
      range.elements -= head;
    }
    if (range.elements > 0) {
      place(range);
    }
  }

  std::vector<PackLaunch> finish() { return std::move(launches_); }

 private:
  // A launch has 2^32 warps, 8 TiB: no device has room for more.
  static std::uint32_t warps_of(const Range& range) {
    const std::uint64_t per_warp = elements_per_warp(range.conversion);
    return static_cast<std::uint32_t>((range.elements - 1) / per_warp + 1);
  }

  bool has_room_for(const Range& range) const {
    if (launches_.empty()) {
      return false;
    }
    const PackLaunch& launch = launches_.back();
    return launch.entries.size() < kMaxTableParts &&
           range.source - launch.header.source_base < kPackWindow &&
           range.destination - launch.header.destination_base < kPackWindow;
  }

  void begin_launch(const Range& first) {
    PackLaunch& launch = launches_.emplace_back();
    launch.entries.reserve(std::min<std::size_t>(n_ranges_, kMaxTableParts));
    launch.header.factor = factor_;
    launch.header.source_base = first.source - kPackWindow / 2;
    launch.header.destination_base = first.destination - kPackWindow / 2;
  }

  void place(const Range& range) {
    if (!has_room_for(range)) {
      begin_launch(range);
    }
    PackLaunch& launch = launches_.back();
    PackTableHeader& header = launch.header;
    const std::uint32_t n_warps = warps_of(range);
    PackPart part{};
    part.source = range.source;
    part.destination = range.destination;
    part.first_warp = header.n_warps;
    part.last_elements = static_cast<std::uint32_t>(
        range.elements - std::uint64_t{n_warps - 1} * elements_per_warp(range.conversion));
    part.conversion = range.conversion;
    launch.entries.push_back(encode(part, header));
    if (n_warps == 1 && header.n_single == header.n_parts) {
      ++header.n_single;
    }
    ++header.n_parts;
    header.n_warps += n_warps;
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
  const auto has_single_warp = [](const PackTensor& tensor) {
    const std::uint64_t wide =
        std::max(element_bytes(tensor.dtype), element_bytes(tensor.buffer_dtype));
    return tensor.elements * wide <= kBytesPerWarp;
  };
  for (const bool single : {true, false}) {
    for (const PackTensor& tensor : tensors) {
      if (has_single_warp(tensor) == single) {
        add(tensor);
      }
    }
  }
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
