#include "shm/from_the_end.h"

#include <algorithm>
#include <vector>

#include "catch.h"

namespace horon {
namespace {

std::vector<std::uint64_t> turns(std::uint64_t n, std::uint64_t stretch) {
  std::vector<std::uint64_t> order;
  for (std::uint64_t i = 0; i < n; ++i) {
    order.push_back(from_the_end(i, n, stretch));
  }
  return order;
}

}  // namespace

TEST_CASE("from the end: stretches go backward, their pieces forward") {
  REQUIRE(turns(10, 4) == std::vector<std::uint64_t>{8, 9, 4, 5, 6, 7, 0, 1, 2, 3});
  REQUIRE(turns(8, 4) == std::vector<std::uint64_t>{4, 5, 6, 7, 0, 1, 2, 3});
  REQUIRE(turns(3, 4) == std::vector<std::uint64_t>{0, 1, 2});
  REQUIRE(turns(3, 1) == std::vector<std::uint64_t>{2, 1, 0});
}

TEST_CASE("from the end: every piece has one turn") {
  for (std::uint64_t n = 0; n < 40; ++n) {
    for (const std::uint64_t stretch : {1, 2, 3, 4, 7}) {
      std::vector<std::uint64_t> order = turns(n, stretch);
      std::sort(order.begin(), order.end());
      for (std::uint64_t i = 0; i < n; ++i) {
        REQUIRE(order[i] == i);
      }
    }
  }
}

TEST_CASE("from the end: all ranks' tensors together count") {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  REQUIRE_FALSE(goes_from_the_end(12 * kMiB, 2));
  REQUIRE(goes_from_the_end(12 * kMiB + 1, 2));
  REQUIRE_FALSE(goes_from_the_end(3 * kMiB, 8));
  REQUIRE(goes_from_the_end(4 * kMiB, 8));
}

}  // namespace horon
