#include "reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "core/error.h"
#include "reduce/kernel_table.h"
#include "reduce_reference.h"

using namespace horon;

namespace {

constexpr size_t kCounts[] = {0, 1, 3, 17, 1000, 4099};
constexpr int kSourceCounts[] = {1, 2, 3, 5};
constexpr double kFactors[] = {0.5, -1.25, 1.0 / 3, 2.0, 1e-3};
constexpr char kGuardByte = 0x5a;

std::vector<const KernelTable*> supported_kernels() {
  std::vector<const KernelTable*> all;
  for (InstructionSet set : kAllInstructionSets) {
    if (const KernelTable* kernels = kernels_for(set)) all.push_back(kernels);
  }
  return all;
}

template <class Body>
void for_each_reducible(Body body) {
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      if (is_reducible(static_cast<DType>(d), static_cast<ReduceOp>(o))) {
        body(static_cast<DType>(d), static_cast<ReduceOp>(o));
      }
    }
  }
}

// 0 where the type has no NaN; else the size of one real number.
size_t real_bytes(DType dtype) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return 2;
  if (dtype == DType::kFloat32 || dtype == DType::kComplex64) return 4;
  return dtype == DType::kFloat64 || dtype == DType::kComplex128 ? 8 : 0;
}

template <class T>
T from_double(double value, DType dtype) {
  if (dtype == DType::kFloat16)
    return static_cast<T>(reference::kFloat16.encode(static_cast<float>(value)));
  if (dtype == DType::kBFloat16)
    return static_cast<T>(reference::kBFloat16.encode(static_cast<float>(value)));
  return static_cast<T>(value);
}

// Random bits (all kinds of NaN and denormals), and for real numbers every other one near 1, so
// that rounding is seen.
std::vector<char> random_elements(size_t count, DType dtype, std::mt19937& random) {
  std::vector<char> bytes(count * element_bytes(dtype));
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint32_t)) {
    const auto bits = static_cast<uint32_t>(random());
    std::memcpy(bytes.data() + at, &bits, std::min(sizeof(bits), bytes.size() - at));
  }
  const size_t size = real_bytes(dtype);
  for (size_t i = 0; size != 0 && i < bytes.size() / size; i += 2) {
    const double value = std::normal_distribution<>(0, 2)(random);
    if (size == 2) reference::put(bytes.data(), i, from_double<uint16_t>(value, dtype));
    if (size == 4) reference::put(bytes.data(), i, from_double<float>(value, dtype));
    if (size == 8) reference::put(bytes.data(), i, from_double<double>(value, dtype));
  }
  return bytes;
}

// Equal bytes; where the reference leaves the payload of a NaN to the CPU (32 and 64 bits), any NaN
// will do.
bool same(const char* got, const char* expected, size_t bytes, DType dtype) {
  if (real_bytes(dtype) == 4 || real_bytes(dtype) == 8) {
    for (size_t i = 0; i < bytes / real_bytes(dtype); ++i) {
      if (real_bytes(dtype) == 4) {
        const float a = reference::get<float>(got, i), b = reference::get<float>(expected, i);
        if (std::memcmp(&a, &b, 4) != 0 && !(std::isnan(a) && std::isnan(b))) return false;
      } else {
        const double a = reference::get<double>(got, i), b = reference::get<double>(expected, i);
        if (std::memcmp(&a, &b, 8) != 0 && !(std::isnan(a) && std::isnan(b))) return false;
      }
    }
    return true;
  }
  return bytes == 0 || std::memcmp(got, expected, bytes) == 0;
}

struct Case {
  DType dtype;
  ReduceOp op;
  int n;
  size_t count;
  std::vector<std::vector<char>> sources;

  Case(DType d, ReduceOp o, int n_sources, size_t c, std::mt19937& random)
      : dtype(d), op(o), n(n_sources), count(c) {
    for (int r = 0; r < n; ++r) sources.push_back(random_elements(count, dtype, random));
  }

  // Into source `in_place` if that is not -1, and, for `to_both`, into the memory next to that as
  // well; everything `offset` bytes off a 64-byte boundary. Checks the guard bytes.
  std::vector<char> run(const KernelTable& kernels, int in_place, size_t offset,
                        bool to_both = false) const {
    const size_t bytes = count * element_bytes(dtype), stride = (bytes + 64 + 127) / 64 * 64;
    std::vector<char> memory(stride * static_cast<size_t>(n + 1) + 64, kGuardByte);
    char* base =
        memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 + offset;
    std::vector<const void*> pointers;
    for (int r = 0; r < n; ++r) {
      std::copy(sources[r].begin(), sources[r].end(), base + stride * r);
      pointers.push_back(base + stride * r);
    }
    const int place = in_place < 0 ? n : in_place;
    const int other_place = to_both ? (place + 1) % (n + 1) : place;
    char* dst = base + stride * place;
    char* also = base + stride * other_place;
    reduce_with(kernels, dst, to_both ? also : nullptr, pointers.data(), n, count, dtype, op,
                kFactors);
    REQUIRE(std::equal(dst, dst + bytes, also));
    for (int r = 0; r <= n; ++r) {
      const char* end = base + stride * r + bytes;
      if (end + 32 <= memory.data() + memory.size())
        REQUIRE(std::count(end, end + 32, kGuardByte) == 32);
      if (r < n && r != place && r != other_place)
        REQUIRE(std::equal(sources[r].begin(), sources[r].end(), base + stride * r));
    }
    return std::vector<char>(dst, dst + bytes);
  }

  std::vector<char> expected() const {
    if (n == 1 && op != ReduceOp::kPremulSum && dtype != DType::kBool) return sources[0];
    std::vector<char> result(count * element_bytes(dtype));
    std::vector<const void*> pointers;
    for (const auto& source : sources) pointers.push_back(source.data());
    reference::reduce(result.data(), pointers, count, dtype, op, kFactors);
    return result;
  }
};

// reduce() of 16-bit elements.
std::vector<uint16_t> reduce_halves(const KernelTable& kernels,
                                    const std::vector<std::vector<uint16_t>>& sources, DType dtype,
                                    ReduceOp op, const double* factors = nullptr) {
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  std::vector<uint16_t> result(sources[0].size());
  reduce_with(kernels, result.data(), nullptr, pointers.data(), static_cast<int>(sources.size()),
              result.size(), dtype, op, factors);
  return result;
}

std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

}  // namespace

TEST_CASE("reduce agrees with a plain reference", "[reduce]") {
  std::mt19937 random(1);
  for_each_reducible([&](DType dtype, ReduceOp op) {
    for (int n : kSourceCounts) {
      for (size_t count : kCounts) {
        const Case one(dtype, op, n, count, random);
        const std::vector<char> expected = one.expected();
        for (const KernelTable* kernels : supported_kernels()) {
          for (int in_place = -1; in_place < n; ++in_place) {
            // Aligned, aligned to the element only, and not even that.
            for (size_t offset : {size_t{0}, element_bytes(dtype), size_t{1}}) {
              for (bool to_both : {false, true}) {
                INFO(name(dtype) << ' ' << name(op) << " n=" << n << " count=" << count << ' '
                                 << kernels->name << " in_place=" << in_place
                                 << " offset=" << offset << " to_both=" << to_both);
                const std::vector<char> got = one.run(*kernels, in_place, offset, to_both);
                REQUIRE(same(got.data(), expected.data(), got.size(), dtype));
              }
            }
          }
        }
      }
    }
  });
}

TEST_CASE("reduce gives the same bits with every instruction set and chunking", "[reduce]") {
  std::mt19937 random(2);
  for_each_reducible([&](DType dtype, ReduceOp op) {
    for (int n : {2, 3, 4, 7}) {
      const size_t count = 2500;
      std::vector<double> factors(static_cast<size_t>(n), 1.0 / 3);
      std::vector<std::vector<char>> sources;
      for (int r = 0; r < n; ++r) sources.push_back(random_elements(count, dtype, random));
      std::vector<const void*> pointers(sources.size());
      std::vector<std::vector<char>> results;
      for (const KernelTable* kernels : supported_kernels()) {
        for (size_t chunk : {count, size_t{1}, size_t{37}}) {
          std::vector<char> result(count * element_bytes(dtype));
          for (size_t at = 0; at < count; at += chunk) {
            for (size_t r = 0; r < sources.size(); ++r)
              pointers[r] = sources[r].data() + at * element_bytes(dtype);
            reduce_with(*kernels, result.data() + at * element_bytes(dtype), nullptr,
                        pointers.data(), n, std::min(chunk, count - at), dtype, op, factors.data());
          }
          results.push_back(result);
          INFO(name(dtype) << ' ' << name(op) << " n=" << n << ' ' << kernels->name
                           << " chunk=" << chunk);
          REQUIRE(result == results[0]);
        }
      }
    }
  });
}

TEST_CASE("reduce keeps and rounds all 65536 values of the half types", "[reduce]") {
  const auto all = all_halves();
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const reference::HalfFormat& format =
        dtype == DType::kFloat16 ? reference::kFloat16 : reference::kBFloat16;
    for (const KernelTable* kernels : supported_kernels()) {
      INFO(name(dtype) << ' ' << kernels->name);
      REQUIRE(reduce_halves(*kernels, {all}, dtype, ReduceOp::kSum) == all);

      // x + -0 is x, for -0 too; every NaN becomes the one.
      auto expected = all;
      for (uint16_t& half : expected)
        half = std::isnan(format.decode(half)) ? format.encode(std::nanf("")) : half;
      const std::vector<uint16_t> minus_zero(all.size(), 0x8000), zero(all.size(), 0);
      REQUIRE(reduce_halves(*kernels, {all, minus_zero}, dtype, ReduceOp::kSum) == expected);
      expected[0x8000] = 0;
      REQUIRE(reduce_halves(*kernels, {all, zero}, dtype, ReduceOp::kSum) == expected);

      // The mean of neighbours is a tie; scaling gives all other cases, denormal results and
      // overflow among them.
      auto next = all;
      for (uint16_t& half : next) ++half;
      const auto means = reduce_halves(*kernels, {all, next}, dtype, ReduceOp::kAvg);
      size_t n_wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        n_wrong += means[i] != format.encode((format.decode(all[i]) + format.decode(next[i])) / 2);
      }
      for (double factor : {1.0 / 3, 0.99999, 1.0001, 0x1p-10, 0x1.8p-13, 0x1p-17, 1000.0,
                            0x1.ffep15, 1e-30, 1e30}) {
        const auto scaled = reduce_halves(*kernels, {all}, dtype, ReduceOp::kPremulSum, &factor);
        for (size_t i = 0; i < all.size(); ++i) {
          n_wrong += scaled[i] != format.encode(format.decode(all[i]) * static_cast<float>(factor));
        }
      }
      REQUIRE(n_wrong == 0);
    }
  }
}

TEST_CASE("reduce rounds half types once", "[reduce]") {
  // 2048 + 1 is a tie in float16; rounded each time, the ones would get lost.
  const std::vector<uint16_t> big(20, reference::kFloat16.encode(2048)),
      one(20, reference::kFloat16.encode(1));
  for (const KernelTable* kernels : supported_kernels()) {
    const auto sum =
        reduce_halves(*kernels, {big, one, one, one, one}, DType::kFloat16, ReduceOp::kSum);
    REQUIRE(sum == std::vector<uint16_t>(20, reference::kFloat16.encode(2052)));
    // 60000 + 60000 - 60000 overflows only if rounded in between.
    const std::vector<uint16_t> up(20, reference::kFloat16.encode(60000)),
        down(20, reference::kFloat16.encode(-60000));
    REQUIRE(reduce_halves(*kernels, {up, up, down}, DType::kFloat16, ReduceOp::kSum) == up);
  }
}

TEST_CASE("reduce propagates NaN whatever its rank and place", "[reduce]") {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum, ReduceOp::kProduct}) {
      for (const KernelTable* kernels : supported_kernels()) {
        for (int n : {2, 3, 4}) {
          for (int with_nan = 0; with_nan < n; ++with_nan) {
            const size_t count = 37, size = element_bytes(dtype),
                         nan_at = static_cast<size_t>(7 * with_nan + 3);
            std::vector<char> one(count * size), one_nan, got(count * size);
            const auto set = [&](std::vector<char>& bytes, size_t i, double value) {
              if (size == 2) reference::put(bytes.data(), i, from_double<uint16_t>(value, dtype));
              if (size == 4) reference::put(bytes.data(), i, static_cast<float>(value));
              if (size == 8) reference::put(bytes.data(), i, value);
            };
            for (size_t i = 0; i < count; ++i) set(one, i, 1.0);
            one_nan = one;
            set(one_nan, nan_at, std::nan(""));
            std::vector<const void*> pointers(static_cast<size_t>(n), one.data());
            pointers[static_cast<size_t>(with_nan)] = one_nan.data();
            reduce_with(*kernels, got.data(), nullptr, pointers.data(), n, count, dtype, op,
                        nullptr);
            auto expected = one;
            for (size_t i = 0; i < count; ++i) set(expected, i, op == ReduceOp::kSum ? n : 1.0);
            set(expected, nan_at, std::nan(""));
            INFO(name(dtype) << ' ' << name(op) << " n=" << n << " NaN in " << with_nan << ' '
                             << kernels->name);
            REQUIRE(got == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("reduce treats any non-zero bool as true and gives 0 or 1", "[reduce]") {
  const uint8_t a[] = {0, 2, 255, 0}, b[] = {0, 1, 0, 128};
  const void* sources[] = {a, b};
  std::vector<uint8_t> got(4);
  reduce(got.data(), sources, 2, 4, DType::kBool, ReduceOp::kSum);
  CHECK(got == std::vector<uint8_t>{0, 1, 1, 1});
  reduce(got.data(), sources, 2, 4, DType::kBool, ReduceOp::kProduct);
  CHECK(got == std::vector<uint8_t>{0, 1, 0, 0});
  reduce(got.data(), sources, 2, 4, DType::kBool, ReduceOp::kBxor);
  CHECK(got == std::vector<uint8_t>{0, 0, 1, 1});
  reduce(got.data(), sources, 1, 4, DType::kBool, ReduceOp::kMin);
  CHECK(got == std::vector<uint8_t>{0, 1, 1, 0});
}

TEST_CASE("reduce truncates and saturates integers as documented", "[reduce]") {
  const int8_t a[] = {127, -128, 5, -5}, b[] = {127, -128, -10, 2};
  const void* sources[] = {a, b};
  std::vector<int8_t> got(4);
  reduce(got.data(), sources, 2, 4, DType::kInt8, ReduceOp::kSum);
  CHECK(got == std::vector<int8_t>{-2, 0, -5, -3});
  reduce(got.data(), sources, 2, 4, DType::kInt8, ReduceOp::kAvg);
  CHECK(got == std::vector<int8_t>{127, -128, -2, -1});
  const double factors[] = {2.5, 0.0};
  reduce(got.data(), sources, 2, 4, DType::kInt8, ReduceOp::kPremulSum, factors);
  CHECK(got == std::vector<int8_t>{127, -128, 12, -12});
  const int64_t large[] = {std::numeric_limits<int64_t>::max(),
                           std::numeric_limits<int64_t>::min()};
  const void* one_source[] = {large};
  const double identity[] = {1.0};
  std::vector<int64_t> kept(2);
  reduce(kept.data(), one_source, 1, 2, DType::kInt64, ReduceOp::kPremulSum, identity);
  CHECK(kept == std::vector<int64_t>(large, large + 2));
}

TEST_CASE("reduce refuses what is not defined and says why", "[reduce]") {
  struct {
    DType dtype;
    ReduceOp op;
    const char* hint;
  } const refused[] = {{DType::kBool, ReduceOp::kAvg, "cast to float32"},
                       {DType::kBool, ReduceOp::kPremulSum, "cast to float32"},
                       {DType::kFloat32, ReduceOp::kBand, "integer dtype"},
                       {DType::kBFloat16, ReduceOp::kBxor, "integer dtype"},
                       {DType::kComplex64, ReduceOp::kMax, "view_as_real"},
                       {DType::kComplex128, ReduceOp::kProduct, "view_as_real"},
                       {DType::kComplex64, ReduceOp::kBor, "view_as_real"},
                       {DType::kOpaque, ReduceOp::kSum, "moved but not reduced"},
                       {DType::kOpaque, ReduceOp::kBor, "moved but not"},
                       {static_cast<DType>(77), ReduceOp::kSum, "same version"},
                       {DType::kInt8, static_cast<ReduceOp>(9), "same version"}};
  char memory[16] = {};
  const void* sources[] = {memory};
  for (const auto& one : refused) {
    INFO(name(one.dtype) << ' ' << name(one.op));
    CHECK_FALSE(is_reducible(one.dtype, one.op));
    CHECK(why_not_reducible(one.dtype, one.op).find(one.hint) != std::string::npos);
    CHECK_THROWS_AS(reduce(memory, sources, 1, 0, one.dtype, one.op), UsageError);
  }
  int n_reducible = 0;
  for_each_reducible([&](DType dtype, ReduceOp op) {
    ++n_reducible;
    CHECK(why_not_reducible(dtype, op).empty());
  });
  CHECK(n_reducible == 4 * 6 + 8 * 9 + 7 + 2 * 3);
  CHECK_THROWS_AS(reduce(memory, sources, 0, 1, DType::kInt8, ReduceOp::kSum), UsageError);
  CHECK_THROWS_AS(reduce(memory, sources, 1, 1, DType::kInt8, ReduceOp::kPremulSum), UsageError);
}

TEST_CASE("reduce looks at no pointer when there is nothing to do", "[reduce]") {
  const void* sources[] = {nullptr, nullptr};
  reduce(nullptr, sources, 2, 0, DType::kFloat32, ReduceOp::kSum);
  reduce(nullptr, sources, 1, 0, DType::kFloat32, ReduceOp::kSum);
  CHECK(std::string(active_instruction_set()) == supported_kernels().back()->name);
}

TEST_CASE("names and sizes of element types and operations", "[dtype]") {
  CHECK(std::string(name(DType::kFloat16)) == "float16");
  CHECK(std::string(name(DType::kComplex128)) == "complex128");
  CHECK(std::string(name(DType::kOpaque)) == "opaque");
  CHECK(std::string(name(ReduceOp::kPremulSum)) == "PREMUL_SUM");
  CHECK(element_bytes(DType::kBFloat16) == 2);
  CHECK(element_bytes(DType::kComplex128) == 16);
  CHECK(element_bytes(DType::kOpaque) == 1);
  CHECK(element_bytes(DType::kBool) == 1);
}
