#include <atomic>
#include <chrono>
#include <thread>

#include "catch.h"
#include "core/linger_budget.h"
#include "core/wait_trust.h"
#include "shm/wait_policy.h"

namespace horon {
namespace {

// Waits that do not happen before the next one that does.
std::uint32_t skipped_waits(WaitTrust& trust) {
  std::uint32_t waits = 0;
  while (!trust.begin_wait()) {
    ++waits;
  }
  return waits;
}

}  // namespace

TEST_CASE("wait trust: what helps goes on", "[wait_trust]") {
  WaitTrust trust;
  for (int wait = 0; wait < 1000; ++wait) {
    REQUIRE(trust.begin_wait());
    trust.record(true);
    REQUIRE(trust.begin_wait());
    trust.record(wait % 2 == 0);  // every fourth does not help
  }
}

TEST_CASE("wait trust: what does not help is tried now and then", "[wait_trust]") {
  WaitTrust trust;
  for (int wait = 0; wait < WaitTrust::kMost; ++wait) {
    REQUIRE(trust.begin_wait());
    trust.record(false);
  }
  for (int trial = 0; trial < 100; ++trial) {
    REQUIRE(skipped_waits(trust) == WaitTrust::kWaitsBetweenTrials - 1);
    trust.record(false);
  }
}

TEST_CASE("wait trust: one that helps is enough to go on", "[wait_trust]") {
  WaitTrust trust;
  for (int wait = 0; wait < 2 * WaitTrust::kMost; ++wait) {
    trust.record(false);
  }
  skipped_waits(trust);
  trust.record(true);
  REQUIRE(trust.begin_wait());
  trust.record(false);
  REQUIRE_FALSE(trust.begin_wait());
}

TEST_CASE("a wait lingers until what it waits for has come", "[wait_trust]") {
  bool has_seen = false;
  // A yield that comes back late, on a busy machine, ends it sooner.
  for (int attempt = 0; attempt < 100 && !has_seen; ++attempt) {
    std::atomic<bool> has_come{false};
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      has_come = true;
    });
    has_seen = WaitPolicy(false).linger([&] { return has_come.load(); }, std::chrono::seconds(60),
                                        std::chrono::hours(1));
    other.join();
  }
  REQUIRE(has_seen);
}

TEST_CASE("a wait lingers no longer than it may, nor where that does not help", "[wait_trust]") {
  WaitPolicy policy(false);
  int looks = 0;
  const auto never = [&] {
    ++looks;
    return false;
  };
  REQUIRE_FALSE(policy.linger(never, std::chrono::seconds(0), std::chrono::hours(1)));
  REQUIRE(looks == 1);
  for (int wait = 0; wait < 4 * WaitTrust::kMost; ++wait) {  // cut short: says nothing
    REQUIRE_FALSE(policy.linger(never, std::chrono::hours(1), std::chrono::microseconds(100)));
  }
  for (int wait = 0; wait < WaitTrust::kMost; ++wait) {
    REQUIRE_FALSE(policy.linger(never, std::chrono::microseconds(100), std::chrono::hours(1)));
  }
  for (std::uint32_t wait = 0; wait + 1 < WaitTrust::kWaitsBetweenTrials; ++wait) {
    looks = 0;
    REQUIRE_FALSE(policy.linger(never, std::chrono::hours(1), std::chrono::hours(1)));
    REQUIRE(looks == 1);
  }
}

TEST_CASE("a wait lingers again when something has happened, but not for ever", "[wait_trust]") {
  LingerBudget budget;
  int n = 0;
  std::chrono::nanoseconds last{LingerBudget::kMost};
  const auto linger = [&](std::chrono::nanoseconds most) {
    ++n;
    CHECK(most <= last);
    CHECK(most.count() > 0);
    last = most;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return true;
  };
  REQUIRE(budget.spend(linger));
  REQUIRE_FALSE(budget.spend(linger));
  REQUIRE(n == 1);
  for (int i = 0; i < 20; ++i) {
    budget.renew();
    budget.spend(linger);
  }
  REQUIRE(n > 1);
  REQUIRE(n <= 5);
}

TEST_CASE("a wait spins and gives up, whoever has the core", "[wait_trust]") {
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
