#include "catch.h"
#include "shm/spin_trust.h"
#include "shm/wait_policy.h"

namespace horon {
namespace {

// Waits that sleep at once before the next one that spins.
std::uint32_t sleeping_waits(SpinTrust& trust) {
  std::uint32_t waits = 0;
  while (!trust.begin_wait()) {
    ++waits;
  }
  return waits;
}

}  // namespace

TEST_CASE("spin trust: what helps goes on", "[spin_trust]") {
  SpinTrust trust;
  for (int wait = 0; wait < 1000; ++wait) {
    REQUIRE(trust.begin_wait());
    trust.record(true);
    REQUIRE(trust.begin_wait());
    trust.record(wait % 2 == 0);  // every fourth does not help
  }
}

TEST_CASE("spin trust: what does not help is tried now and then", "[spin_trust]") {
  SpinTrust trust;
  for (int wait = 0; wait < SpinTrust::kMost; ++wait) {
    REQUIRE(trust.begin_wait());
    trust.record(false);
  }
  for (int trial = 0; trial < 100; ++trial) {
    REQUIRE(sleeping_waits(trust) == SpinTrust::kWaitsBetweenTrials - 1);
    trust.record(false);
  }
}

TEST_CASE("spin trust: one that helps is enough to go on", "[spin_trust]") {
  SpinTrust trust;
  for (int wait = 0; wait < 2 * SpinTrust::kMost; ++wait) {
    trust.record(false);
  }
  sleeping_waits(trust);
  trust.record(true);
  REQUIRE(trust.begin_wait());
  trust.record(false);
  REQUIRE_FALSE(trust.begin_wait());
}

TEST_CASE("a wait spins and gives up, whoever has the core", "[spin_trust]") {
  for (const bool is_crowded : {false, true}) {
    WaitPolicy policy(is_crowded);
    for (int wait = 0; wait < 100; ++wait) {
      REQUIRE_FALSE(policy.spin([] { return false; }));  // always ends
      int looks = 0;
      REQUIRE(policy.spin([&] { return ++looks == 3; }));  // or sees what it waits for
    }
  }
}

}  // namespace horon
