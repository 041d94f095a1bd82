#include "core/add_up_to.h"

#include <limits>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();

bool adds_up_to(std::int64_t total, const std::vector<std::int64_t>& numbers) {
  return add_up_to(total, numbers);
}

}  // namespace

TEST_CASE("numbers that add up, and others") {
  REQUIRE(adds_up_to(0, {}));
  REQUIRE(adds_up_to(0, {0, 0}));
  REQUIRE(adds_up_to(6, {1, 0, 5}));
  REQUIRE(adds_up_to(kMost, {0, kMost}));
  REQUIRE_FALSE(adds_up_to(6, {}));
  REQUIRE_FALSE(adds_up_to(6, {1, 4}));
  REQUIRE_FALSE(adds_up_to(6, {1, 6}));
  REQUIRE_FALSE(adds_up_to(6, {7, -1}));
  REQUIRE_FALSE(adds_up_to(6, {-1, 7}));
}

TEST_CASE("numbers that fit in, and others") {
  using Numbers = std::vector<std::int64_t>;
  REQUIRE(fit_into(0, Numbers{}));
  REQUIRE(fit_into(6, Numbers{}));
  REQUIRE(fit_into(6, Numbers{1, 4}));
  REQUIRE(fit_into(6, Numbers{1, 5}));
  REQUIRE_FALSE(fit_into(6, Numbers{1, 6}));
  REQUIRE_FALSE(fit_into(6, Numbers{-1, 2}));
  REQUIRE_FALSE(fit_into(6, Numbers{kMost, kMost, 8}));
}

TEST_CASE("numbers that add up in 64 bits only") {
  REQUIRE_FALSE(adds_up_to(6, {kMost, kMost, 8}));
  REQUIRE_FALSE(adds_up_to(0, {kLeast, kLeast}));
  REQUIRE_FALSE(adds_up_to(kMost, {kMost, kMost, kMost, 2}));
}
