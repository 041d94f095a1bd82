#include "shm/line_copies.h"

#include <algorithm>
#include <random>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

constexpr std::size_t kGuardBytes = 128;
constexpr std::byte kGuard{0x5a};

// Random bytes from `offset` on, guard bytes around them.
std::vector<std::byte> guarded(std::size_t bytes, std::size_t offset, std::minstd_rand& random) {
  std::vector<std::byte> memory(2 * kGuardBytes + offset + bytes, kGuard);
  std::generate_n(memory.begin() + static_cast<std::ptrdiff_t>(kGuardBytes + offset), bytes,
                  [&] { return static_cast<std::byte>(random() >> 8); });
  return memory;
}

}  // namespace

TEST_CASE("swap lines: what was shared goes out, the next comes in, nothing else changes") {
  std::minstd_rand random(1);
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 127, 1000, 1024, 4096, 70001}) {
    for (const std::size_t offset : {0, 1, 16, 33}) {
      INFO(bytes << " bytes, " << offset << " off");
      auto to = guarded(bytes, offset, random);
      auto shared = guarded(bytes, 0, random);
      const auto from = guarded(bytes, 2 * offset, random);
      auto expected_to = to;
      auto expected_shared = shared;
      std::copy_n(shared.data() + kGuardBytes, bytes, expected_to.data() + kGuardBytes + offset);
      std::copy_n(from.data() + kGuardBytes + 2 * offset, bytes,
                  expected_shared.data() + kGuardBytes);
      swap_lines(to.data() + kGuardBytes + offset, shared.data() + kGuardBytes,
                 from.data() + kGuardBytes + 2 * offset, bytes);
      REQUIRE(to == expected_to);
      REQUIRE(shared == expected_shared);
    }
  }
}

TEST_CASE("copy lines: the bytes arrive, nothing else changes") {
  std::minstd_rand random(2);
  for (const std::size_t bytes : {0, 1, 4095, 4096, 4097, 70001}) {
    for (const std::size_t offset : {0, 1, 16, 63}) {
      INFO(bytes << " bytes, " << offset << " off");
      auto to = guarded(bytes, offset, random);
      const auto from = guarded(bytes, 2 * offset, random);
      auto expected = to;
      std::copy_n(from.data() + kGuardBytes + 2 * offset, bytes,
                  expected.data() + kGuardBytes + offset);
      copy_lines(to.data() + kGuardBytes + offset, from.data() + kGuardBytes + 2 * offset, bytes);
      REQUIRE(to == expected);
    }
  }
}

TEST_CASE("line kernels: all instruction sets of this CPU do the same") {
  std::minstd_rand random(3);
  REQUIRE(line_kernels_for(InstructionSet::kBaseline) != nullptr);
  for (const InstructionSet set : kAllInstructionSets) {
    const LineKernels* kernels = line_kernels_for(set);
    if (kernels == nullptr) {
      continue;
    }
    INFO("instruction set " << static_cast<int>(set));
    for (const std::size_t bytes : {0, 64, 4096}) {
      for (const std::size_t offset : {0, 8, 33}) {
        auto to = guarded(bytes, offset, random);
        auto shared = guarded(bytes, 0, random);
        const auto from = guarded(bytes, offset, random);
        auto expected_to = to;
        std::copy_n(shared.data() + kGuardBytes, bytes, expected_to.data() + kGuardBytes + offset);
        auto expected_shared = shared;
        std::copy_n(from.data() + kGuardBytes + offset, bytes,
                    expected_shared.data() + kGuardBytes);
        kernels->swap(to.data() + kGuardBytes + offset, shared.data() + kGuardBytes,
                      from.data() + kGuardBytes + offset, bytes);
        REQUIRE(to == expected_to);
        REQUIRE(shared == expected_shared);
        for (const auto copy : {kernels->copy, kernels->copy_ahead}) {
          to = guarded(bytes, offset, random);
          copy(to.data() + kGuardBytes + offset, from.data() + kGuardBytes + offset, bytes);
          REQUIRE(to == from);
        }
      }
    }
  }
}
