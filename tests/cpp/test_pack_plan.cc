// The pack kernel's index arithmetic and its loads and stores, run on the host: every warp, every
// lane, against plain loops.
#include "cuda/pack_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "catch.h"
#include "core/error.h"
#include "pack_on_host.h"
#include "reduce_reference.h"

using namespace horon;
using namespace horon::testing;

namespace {

std::uint64_t address_of(const std::byte* memory) {
  return reinterpret_cast<std::uint64_t>(memory);
}

// Memory whose first byte is `misalignment` past a multiple of 64, with canaries on both sides.
class Memory {
 public:
  Memory(std::size_t bytes, std::size_t misalignment) : storage_(bytes + 192), bytes_(bytes) {
    const std::uint64_t base = address_of(storage_.data()) + 64;
    data_ = storage_.data() + 64 + (64 - base % 64) % 64 + misalignment % 64;
    std::fill(storage_.begin(), storage_.end(), kCanary);
  }
  std::byte* data() { return data_; }
  bool has_canaries() const {
    return std::all_of(storage_.data(), static_cast<const std::byte*>(data_), is_canary) &&
           std::all_of(static_cast<const std::byte*>(data_) + bytes_,
                       storage_.data() + storage_.size(), is_canary);
  }

 private:
  static constexpr std::byte kCanary{0xa5};
  static bool is_canary(std::byte value) { return value == kCanary; }

  std::vector<std::byte> storage_;
  std::size_t bytes_;
  std::byte* data_;
};

void fill_random(std::byte* data, std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<std::byte>(random());
  }
}

// Elements that are numbers, of all magnitudes; a few NaNs and infinities.
void fill_numbers(std::byte* data, std::size_t elements, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < elements; ++i) {
    const float special[] = {HUGE_VALF, -HUGE_VALF, std::nanf(""), 0.0F, -0.0F, 65519.9F, 1e-7F};
    const float value = random() % 16 == 0 ? special[random() % std::size(special)]
                                           : std::ldexp(static_cast<float>(random()) / 4e9F - 0.5F,
                                                        static_cast<int>(random() % 40) - 20);
    switch (dtype) {
      case DType::kFloat16:
        reference::put(data, i, reference::kFloat16.encode(value));
        break;
      case DType::kBFloat16:
        reference::put(data, i, reference::kBFloat16.encode(value));
        break;
      case DType::kFloat64:
        reference::put(data, i, static_cast<double>(value) * (1 + 1e-12));
        break;
      default:
        reference::put(data, i, value);
    }
  }
}

double load(const std::byte* data, std::size_t i, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return reference::kFloat16.decode(reference::get<std::uint16_t>(data, i));
    case DType::kBFloat16:
      return reference::kBFloat16.decode(reference::get<std::uint16_t>(data, i));
    case DType::kFloat64:
      return reference::get<double>(data, i);
    default:
      return reference::get<float>(data, i);
  }
}

// One element, converted in the plainest way, as the bytes that must be stored.
std::vector<std::byte> expected_element(const std::byte* source, std::size_t i, DType from,
                                        DType to, double factor) {
  std::vector<std::byte> bytes(element_bytes(to));
  if (from == to && factor == 1.0) {
    std::memcpy(bytes.data(), source + i * bytes.size(), bytes.size());
    return bytes;
  }
  const double value = load(source, i, from);
  const float scaled = static_cast<float>(value) * static_cast<float>(factor);
  switch (to) {
    case DType::kFloat16:
      reference::put(bytes.data(), 0, reference::kFloat16.encode(scaled));
      break;
    case DType::kBFloat16:
      reference::put(bytes.data(), 0, reference::kBFloat16.encode(scaled));
      break;
    case DType::kFloat64:
      reference::put(bytes.data(), 0, value * factor);
      break;
    default:
      reference::put(bytes.data(), 0, scaled);
  }
  return bytes;
}

bool is_nan(const std::byte* element, DType dtype) { return std::isnan(load(element, 0, dtype)); }

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// A tensor that is packed into a buffer and back, with what it takes to check it.
struct TestTensor {
  DType dtype = DType::kFloat32;
  DType buffer_dtype = DType::kFloat32;
  std::size_t elements = 0;
  std::size_t misalignment = 0;  // of the tensor's address
};

// Packs, checks the buffer, unpacks into other memory, and checks that.
void check_round_trip(const std::vector<TestTensor>& tensors, double factor,
                      std::size_t buffer_alignment) {
  std::vector<Memory> sources;
  std::vector<Memory> results;
  std::vector<PackTensor> packed;
  std::vector<PackTensor> unpacked;
  std::size_t buffer_bytes = 0;
  for (const TestTensor& tensor : tensors) {
    const std::size_t bytes = tensor.elements * element_bytes(tensor.dtype);
    sources.emplace_back(bytes, tensor.misalignment);
    results.emplace_back(bytes, tensor.misalignment + element_bytes(tensor.dtype));
    if (is_floating(tensor.dtype)) {
      fill_numbers(sources.back().data(), tensor.elements, tensor.dtype, 7 + tensor.elements % 91);
    } else {
      fill_random(sources.back().data(), bytes, 7 + tensor.elements % 91);
    }
    buffer_bytes = (buffer_bytes + buffer_alignment - 1) / buffer_alignment * buffer_alignment;
    PackTensor item;
    item.address = address_of(sources.back().data());
    item.buffer_offset = buffer_bytes;
    item.elements = tensor.elements;
    item.dtype = tensor.dtype;
    item.buffer_dtype = tensor.buffer_dtype;
    packed.push_back(item);
    item.address = address_of(results.back().data());
    unpacked.push_back(item);
    buffer_bytes += tensor.elements * element_bytes(tensor.buffer_dtype);
  }
  Memory buffer(buffer_bytes, 0);

  const auto check = [&](const std::byte* from, DType from_dtype, const std::byte* to,
                         DType to_dtype, std::size_t elements) {
    for (std::size_t i = 0; i < elements; ++i) {
      const auto expected = expected_element(from, i, from_dtype, to_dtype, factor);
      const std::byte* got = to + i * expected.size();
      const bool same = std::memcmp(got, expected.data(), expected.size()) == 0;
      // Which NaN it is, is the hardware's business where a value stays of its type.
      const bool both_nan =
          is_floating(to_dtype) && is_nan(expected.data(), to_dtype) && is_nan(got, to_dtype);
      if (!same && !both_nan) {
        FAIL("element " << i << " of " << elements << ' ' << name(from_dtype) << " -> "
                        << name(to_dtype));
      }
    }
  };
  run_on_host(plan_pack(PackDirection::kPack, packed, address_of(buffer.data()), factor));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(sources[i].data(), tensors[i].dtype, buffer.data() + packed[i].buffer_offset,
          tensors[i].buffer_dtype, tensors[i].elements);
  }
  REQUIRE(buffer.has_canaries());
  run_on_host(plan_pack(PackDirection::kUnpack, unpacked, address_of(buffer.data()), factor));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(buffer.data() + packed[i].buffer_offset, tensors[i].buffer_dtype, results[i].data(),
          tensors[i].dtype, tensors[i].elements);
    REQUIRE(results[i].has_canaries());
  }
}

}  // namespace

TEST_CASE("half bits: all float16 and bfloat16 values decode as the reference says") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float as_float16 = to_float(Float16{half});
    const float as_bfloat16 = to_float(BFloat16{half});
    const float float16 = reference::kFloat16.decode(half);
    const float bfloat16 = reference::kBFloat16.decode(half);
    REQUIRE((as_float16 == float16 || (std::isnan(as_float16) && std::isnan(float16))));
    REQUIRE((as_bfloat16 == bfloat16 || (std::isnan(as_bfloat16) && std::isnan(bfloat16))));
    REQUIRE(std::signbit(as_float16) == ((half & 0x8000) != 0));
  }
}

TEST_CASE("half bits: rounding is to nearest even, as the reference says") {
  std::mt19937 random(3);
  const auto check = [](float value) {
    if (std::isnan(value)) {
      REQUIRE(to_float16(value).bits == half_bits::kCanonicalNan);
      REQUIRE(to_bfloat16(value).bits == half_bits::kCanonicalNan);
      return;
    }
    REQUIRE(to_float16(value).bits == reference::kFloat16.encode(value));
    REQUIRE(to_bfloat16(value).bits == reference::kBFloat16.encode(value));
  };
  for (int i = 0; i < 200000; ++i) {
    check(half_bits::float_of(static_cast<std::uint32_t>(random())));
  }
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {  // every tie and its neighbours
    const float low = to_float(Float16{static_cast<std::uint16_t>(bits)});
    const float high = to_float(Float16{static_cast<std::uint16_t>(bits + 1)});
    const float tie = std::isinf(high) ? 65520.0F : (low + high) / 2;
    for (const float value : {tie, std::nextafterf(tie, 0), std::nextafterf(tie, HUGE_VALF)}) {
      check(value);
      check(-value);
    }
  }
}

TEST_CASE("pack: every dtype there and back, odd sizes and addresses") {
  for (int code = 0; code < kDTypeCount; ++code) {
    const auto dtype = static_cast<DType>(code);
    const std::size_t element = element_bytes(dtype);
    INFO(name(dtype));
    std::vector<TestTensor> tensors;
    for (const std::size_t elements : {0, 1, 2, 3, 5, 15, 16, 17, 63, 1000, 4096, 9999}) {
      for (std::size_t shift = 0; shift < 3; ++shift) {
        tensors.push_back({dtype, dtype, elements, shift * element});
      }
    }
    check_round_trip(tensors, 1.0, 16);
    check_round_trip(tensors, 1.0, element);  // nothing in the buffer is aligned to 16
    if (is_floating(dtype)) {
      check_round_trip(tensors, 1.0 / 3, 16);
      check_round_trip(tensors, -2.5, element);
    }
  }
}

TEST_CASE("pack: casts between float32 and the half types, with and without a factor") {
  const DType halves[] = {DType::kFloat16, DType::kBFloat16};
  for (const DType half : halves) {
    for (const double factor : {1.0, 0.125, 1.0 / 3}) {
      for (const std::size_t alignment : {2, 4, 8, 16}) {
        std::vector<TestTensor> tensors;
        for (const std::size_t elements : {1, 2, 3, 4, 5, 8, 31, 32, 33, 2048, 10007}) {
          for (const std::size_t shift : {0, 4, 8, 12}) {
            tensors.push_back({DType::kFloat32, half, elements, shift});
          }
        }
        check_round_trip(tensors, factor, alignment);
      }
      // Half tensors in a buffer of float32.
      check_round_trip({{half, DType::kFloat32, 777, 2}, {half, DType::kFloat32, 16, 0}}, factor,
                       4);
    }
  }
}

TEST_CASE("pack: thousands of tensors of mixed dtypes need several launches and lose nothing") {
  std::vector<TestTensor> tensors;
  std::mt19937 random(11);
  for (int i = 0; i < 3000; ++i) {
    const auto dtype = static_cast<DType>(random() % kDTypeCount);
    tensors.push_back({dtype, dtype, random() % 40, random() % 4 * element_bytes(dtype)});
  }
  tensors.push_back({DType::kFloat32, DType::kFloat32, 100000, 4});
  check_round_trip(tensors, 1.0, 16);
}

TEST_CASE("pack: what fits one table is one launch, whatever the sizes") {
  std::vector<PackTensor> tensors;
  std::uint64_t offset = 0;
  for (std::uint64_t i = 0; i < kMaxTableParts; ++i) {
    PackTensor tensor;
    tensor.address = 0x7f0000000000 + (i << 27);
    tensor.buffer_offset = offset;
    tensor.elements = 1 + i * i;
    offset += (tensor.elements * 4 + 15) / 16 * 16;
    tensors.push_back(tensor);
  }
  REQUIRE(plan_pack(PackDirection::kPack, tensors, 0x10000).size() == 1);
  tensors.push_back(tensors.back());
  const auto launches = plan_pack(PackDirection::kPack, tensors, 0x10000);
  REQUIRE(launches.size() == 2);
  REQUIRE(launches[0].entries.size() == kMaxTableParts);
  REQUIRE(launches[1].entries.size() == 1);
  REQUIRE(plan_pack(PackDirection::kPack, {}, 0x10000).empty());
  REQUIRE(plan_pack(PackDirection::kPack, {PackTensor{}}, 0x10000).empty());
}

TEST_CASE("pack: access widths are the widest that both addresses permit") {
  struct Case {
    std::uint64_t tensor_shift, buffer_shift;
    DType dtype, buffer_dtype;
    double factor;
    std::vector<std::pair<std::uint64_t, int>> parts;  // elements (bytes for copies), access_bytes
  };
  const DType f32 = DType::kFloat32;
  const DType f16 = DType::kFloat16;
  const DType bytes = DType::kOpaque;
  const Case cases[] = {
      {0, 0, f32, f32, 1, {{400, 16}}},
      {4, 0, f32, f32, 1, {{400, 4}}},
      {4, 4, f32, f32, 1, {{12, 4}, {388, 16}}},
      {8, 0, f32, f32, 1, {{400, 8}}},
      {1, 0, bytes, bytes, 1, {{100, 1}}},
      {1, 1, bytes, bytes, 1, {{15, 1}, {85, 16}}},
      {1, 3, bytes, bytes, 1, {{1, 1}, {99, 2}}},
      {0, 0, f32, f32, 2, {{100, 16}}},
      {4, 0, f32, f32, 2, {{100, 4}}},
      {4, 4, f32, f32, 2, {{3, 4}, {97, 16}}},
      {2, 2, f16, f16, 2, {{7, 2}, {93, 16}}},
      {0, 0, f32, f16, 1, {{100, 16}}},
      {0, 8, f32, f16, 1, {{100, 16}}},
      {8, 4, f32, f16, 1, {{2, 4}, {98, 16}}},
      {4, 4, f32, f16, 1, {{100, 4}}},
  };
  for (const Case& each : cases) {
    PackTensor tensor;
    tensor.address = 0x1000 + each.tensor_shift;
    tensor.buffer_offset = each.buffer_shift;
    tensor.elements = 100;
    tensor.dtype = each.dtype;
    tensor.buffer_dtype = each.buffer_dtype;
    INFO(name(each.dtype) << " + " << each.tensor_shift << " -> " << name(each.buffer_dtype)
                          << " + " << each.buffer_shift << " by " << each.factor);
    for (const PackDirection direction : {PackDirection::kPack, PackDirection::kUnpack}) {
      const auto launches = plan_pack(direction, {tensor}, 0x20000, each.factor);
      REQUIRE(launches.size() == 1);
      std::vector<std::pair<std::uint64_t, int>> parts;
      for (const PackPart& part : parts_of(launches[0])) {  // each of one warp
        const ElementSizes sizes = sizes_of(part.conversion);
        const std::uint32_t access_bytes =
            part.conversion == PackConversion::kCopy ? copy_access_bytes(part)
            : has_vectors(sizes, part)               ? kAccessBytes
                                                     : wide_bytes(sizes_of(part.conversion));
        parts.emplace_back(part.last_elements, access_bytes);
      }
      REQUIRE(parts == each.parts);
    }
  }
}

TEST_CASE("pack: parts of more than 2^32 bytes, without overflow") {
  // Only indices are computed: the addresses are made up.
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  std::vector<PackTensor> tensors(3);
  tensors[0] = {0x100000000000, 0, 5 * kGiB + 3, DType::kUInt8, DType::kUInt8};
  tensors[1] = {0x102000000000, 8 * kGiB, 20 * kGiB + 1, DType::kFloat32, DType::kFloat32};
  tensors[2] = {0x104000000000, 100 * kGiB, 7, DType::kFloat64, DType::kFloat64};
  constexpr std::uint64_t kBuffer = 0x400000000000;
  const auto launches = plan_pack(PackDirection::kPack, tensors, kBuffer);
  REQUIRE(launches.size() == 1);
  const std::uint64_t n_bytes[] = {tensors[0].elements, tensors[1].elements * 4, 7 * 8};
  const HostTable table{launches[0].header, launches[0].entries};
  const std::uint32_t n_warps = table.header.n_warps;
  struct Range {
    std::uint64_t tensor, begin, end;  // bytes
  };
  const auto range_of = [&](std::uint32_t warp) {
    const PackSlice slice = slice_of(table, warp);
    const std::uint64_t from = slice.part.source + slice.first;
    const std::uint64_t tensor = (from >> 37) & 3;
    INFO("warp " << warp << " of tensor " << tensor);
    REQUIRE(slice.part.destination == kBuffer + tensors[tensor].buffer_offset);
    const std::uint64_t begin = from - tensors[tensor].address;
    return Range{tensor, begin, begin + slice.count};
  };
  const auto require_neighbours = [&](std::uint32_t warp) {
    const Range one = range_of(warp);
    const Range next = range_of(warp + 1);
    INFO("warp " << warp << " of tensor " << one.tensor);
    if (next.tensor == one.tensor) {
      REQUIRE(next.begin == one.end);
    } else {
      REQUIRE(one.end == n_bytes[one.tensor]);
      REQUIRE(next.begin == 0);
    }
  };
  // Without gaps or overlaps: each warp begins where the one before it ends. There are millions, of
  // which some thousands are looked at, and those where parts begin.
  const std::uint32_t stride = n_warps / 4096;
  REQUIRE(stride > 1);
  for (std::uint32_t warp = 0; warp + 1 < n_warps; warp += stride) {
    require_neighbours(warp);
  }
  std::map<std::uint64_t, std::uint64_t> ends;  // of tensors
  for (const PackEntry& entry : launches[0].entries) {
    if (entry.first_warp != 0) {
      require_neighbours(entry.first_warp - 1);
      const Range last = range_of(entry.first_warp - 1);
      ends[last.tensor] = last.end;
    }
  }
  const Range last = range_of(n_warps - 1);
  ends[last.tensor] = last.end;
  for (const std::uint64_t tensor : {0, 1, 2}) {
    REQUIRE(ends[tensor] == n_bytes[tensor]);
  }
}

TEST_CASE("pack: addresses that are far from each other need a launch for each window") {
  constexpr std::uint64_t kBuffer = 0x7f0000000000;
  const auto sources_at = [&](const std::vector<std::uint64_t>& addresses) {
    std::vector<PackTensor> tensors;
    for (const std::uint64_t address : addresses) {
      tensors.push_back({address, tensors.size() * 64, 16});
    }
    const auto launches = plan_pack(PackDirection::kPack, tensors, kBuffer);
    std::vector<std::size_t> parts_per_launch;
    std::size_t i = 0;
    for (const PackLaunch& launch : launches) {
      for (const PackPart& part : parts_of(launch)) {
        REQUIRE(part.source == addresses[i]);
        REQUIRE(part.destination == kBuffer + i * 64);
        ++i;
      }
      parts_per_launch.push_back(launch.entries.size());
    }
    REQUIRE(i == addresses.size());
    return parts_per_launch;
  };
  using Parts = std::vector<std::size_t>;
  constexpr std::uint64_t kHalf = kPackWindow / 2;
  constexpr std::uint64_t kBase = 3 * kPackWindow;
  REQUIRE(sources_at({kBase, kBase + kHalf - 16, kBase - kHalf}) == Parts{3});
  REQUIRE(sources_at({kBase, kBase + kHalf}) == Parts{1, 1});
  REQUIRE(sources_at({kBase, kBase - kHalf - 16}) == Parts{1, 1});
  REQUIRE(sources_at({kBase, kBase + 16, kBase + 2 * kHalf, kBase + kHalf + 16}) == Parts{2, 2});
  REQUIRE(sources_at({0x1000, 0x2000}) == Parts{2});  // bases below zero wrap around
}

TEST_CASE("pack: parts of one warp lie first and are found without a search") {
  std::vector<PackTensor> tensors;
  std::uint64_t offset = 0;
  const auto add = [&](std::uint64_t elements, DType dtype, DType buffer_dtype) {
    tensors.push_back({0x100000000000 + offset * 2, offset, elements, dtype, buffer_dtype});
    offset += (elements * 8 + 15) / 16 * 16;
  };
  const DType f32 = DType::kFloat32;
  const DType f16 = DType::kFloat16;
  add(std::uint64_t{15} << 20, f32, f32);
  add(kBytesPerWarp / 4, f32, f32);      // just one
  add(kBytesPerWarp / 4 + 1, f32, f32);  // and one more
  add(kBytesPerWarp / 4, f16, f32);      // the wider side counts
  add(kBytesPerWarp / 2, f16, f32);
  add(3, f32, f32);
  const auto launches = plan_pack(PackDirection::kPack, tensors, 0x400000000000);
  REQUIRE(launches.size() == 1);
  const HostTable table{launches[0].header, launches[0].entries};
  REQUIRE(table.header.n_single == 3);
  REQUIRE(table.header.n_warps == 3 + (60 << 20) / kBytesPerWarp + 2 + 2);
  std::vector<std::uint64_t> elements(table.header.n_parts);
  for (std::uint32_t warp = 0; warp < table.header.n_warps; ++warp) {
    const std::uint32_t i = find_part(table, warp);
    const PackPart part = parts_of(launches[0])[i];
    REQUIRE((warp >= table.header.n_single || i == warp));
    const PackSlice slice = slice_of(table, warp);
    REQUIRE(slice.count > 0);
    REQUIRE(slice.count * wide_bytes(sizes_of(part.conversion)) <= kBytesPerWarp);
    const std::uint32_t unit = part.conversion == PackConversion::kCopy ? 4 : 1;
    elements[i] += slice.count / unit;
  }
  REQUIRE(elements == std::vector<std::uint64_t>{kBytesPerWarp / 4, kBytesPerWarp / 4, 3,
                                                 std::uint64_t{15} << 20, kBytesPerWarp / 4 + 1,
                                                 kBytesPerWarp / 2});
}

TEST_CASE("pack: the table's entries hold every part") {
  std::mt19937_64 random(5);
  PackTableHeader header{};
  for (int i = 0; i < 10000; ++i) {
    header.source_base = random();
    header.destination_base = random();
    PackPart part{};
    part.source = header.source_base + random() % kPackWindow;
    part.destination = header.destination_base + random() % kPackWindow;
    part.first_warp = static_cast<std::uint32_t>(random());
    part.last_elements = static_cast<std::uint32_t>(1 + random() % kBytesPerWarp);
    part.conversion = static_cast<PackConversion>(random() % 9);
    const PackPart found = decode(encode(part, header), header);
    REQUIRE(found.source == part.source);
    REQUIRE(found.destination == part.destination);
    REQUIRE(found.first_warp == part.first_warp);
    REQUIRE(found.last_elements == part.last_elements);
    REQUIRE(found.conversion == part.conversion);
  }
}

TEST_CASE("pack: what can not be done is refused") {
  const auto plan = [](PackTensor tensor, double factor) {
    return plan_pack(PackDirection::kPack, {tensor}, 0x400000000000, factor);
  };
  const PackTensor good{0x1000, 0, 4};
  REQUIRE_NOTHROW(plan(good, 0.5));
  for (const DType dtype : {DType::kInt32, DType::kBool, DType::kComplex64, DType::kOpaque}) {
    REQUIRE_NOTHROW(plan({0x1000, 0, 4, dtype, dtype}, 1));
    REQUIRE_THROWS_AS(plan({0x1000, 0, 4, dtype, dtype}, 0.5), UsageError);
    REQUIRE_THROWS_AS(plan({0x1000, 0, 4, dtype, DType::kFloat32}, 1), UsageError);
  }
  REQUIRE_THROWS_AS(plan({0x1000, 0, 4, DType::kFloat64, DType::kFloat32}, 1), UsageError);
  REQUIRE_THROWS_AS(plan({0x1000, 0, 4, DType::kFloat16, DType::kBFloat16}, 1), UsageError);
  REQUIRE_THROWS_AS(plan({0, 0, 4}, 1), UsageError);
  REQUIRE_THROWS_AS(plan({0x1002, 0, 4}, 0.5), UsageError);
  REQUIRE_THROWS_AS(plan({0x1000, 2, 4}, 0.5), UsageError);
  REQUIRE_NOTHROW(plan({0x1001, 3, 4}, 1));  // bytes
}
