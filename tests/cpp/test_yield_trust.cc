#include "catch.h"
#include "shm/yield_trust.h"

namespace horon {
namespace {

constexpr std::chrono::microseconds kQuick{20};
constexpr std::chrono::milliseconds kSlow{3};

// Waits that go straight to the futex before the next one that yields.
std::uint32_t futex_waits(YieldTrust& trust) {
  std::uint32_t waits = 0;
  while (!trust.begin_wait()) {
    ++waits;
  }
  return waits;
}

}  // namespace

TEST_CASE("yield trust: quick yields go on for ever", "[yield_trust]") {
  YieldTrust trust;
  for (int wait = 0; wait < 1000; ++wait) {
    REQUIRE(trust.begin_wait());
    REQUIRE(trust.came_back_after(kQuick));
    REQUIRE(trust.came_back_after(YieldTrust::kSlowYield));
  }
}

TEST_CASE("yield trust: slow yields are asked for less and less", "[yield_trust]") {
  YieldTrust trust;
  std::uint32_t expected = YieldTrust::kFirstPenalty;
  REQUIRE(trust.begin_wait());
  for (int i = 0; i < 20; ++i) {
    REQUIRE_FALSE(trust.came_back_after(kSlow));
    REQUIRE(futex_waits(trust) == expected);
    expected = std::min(2 * expected, YieldTrust::kMostPenalty);
  }
}

TEST_CASE("yield trust: a few good waits between slow ones are no reason to forgive",
          "[yield_trust]") {
  YieldTrust trust;
  std::uint32_t expected = YieldTrust::kFirstPenalty;
  REQUIRE(trust.begin_wait());
  for (int i = 0; i < 5; ++i) {
    REQUIRE_FALSE(trust.came_back_after(kSlow));
    REQUIRE(futex_waits(trust) == expected);
    expected *= 2;
    for (std::uint32_t wait = 1; wait < YieldTrust::kForgivenAfter; ++wait) {
      REQUIRE(trust.came_back_after(kQuick));
      REQUIRE(trust.begin_wait());
    }
  }
}

TEST_CASE("yield trust: many good waits are", "[yield_trust]") {
  YieldTrust trust;
  REQUIRE(trust.begin_wait());
  for (int i = 0; i < 5; ++i) {
    REQUIRE_FALSE(trust.came_back_after(kSlow));
    (void)futex_waits(trust);
  }
  for (std::uint32_t wait = 0; wait < YieldTrust::kForgivenAfter; ++wait) {
    REQUIRE(trust.came_back_after(kQuick));
    REQUIRE(trust.begin_wait());
  }
  REQUIRE_FALSE(trust.came_back_after(kSlow));
  REQUIRE(futex_waits(trust) == YieldTrust::kFirstPenalty);
}

}  // namespace horon
