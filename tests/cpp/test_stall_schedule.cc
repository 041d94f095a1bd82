#include "watch/stall_schedule.h"

#include <vector>

#include "catch.h"

using namespace horon;
using std::chrono::seconds;

namespace {

constexpr seconds kPlenty{10'000};

// The seconds at which a wait that is looked at each second is reported.
std::vector<int> reported_at(seconds interval, int until, seconds timeout) {
  StallSchedule schedule{interval};
  std::vector<int> at;
  for (int second = 1; second <= until; ++second) {
    if (schedule.is_due(seconds(second), timeout - seconds(second))) {
      at.push_back(second);
    }
  }
  return at;
}

}  // namespace

TEST_CASE("stall schedule: after the interval, and each time after twice as long") {
  REQUIRE(reported_at(seconds(60), 1000, kPlenty) == std::vector<int>{60, 120, 240, 480, 960});
  REQUIRE(reported_at(seconds(1), 9, kPlenty) == std::vector<int>{1, 2, 4, 8});
}

TEST_CASE("stall schedule: once more before time is up") {
  REQUIRE(reported_at(seconds(60), 100, seconds(100)) == std::vector<int>{60, 98});
  REQUIRE(reported_at(seconds(60), 30, seconds(30)) == std::vector<int>{28});
  REQUIRE(reported_at(seconds(60), 61, seconds(61)) == std::vector<int>{59, 60});
  REQUIRE(reported_at(seconds(5), 6, seconds(6)) == std::vector<int>{4, 5});
  REQUIRE(reported_at(seconds(4), 6, seconds(6)) == std::vector<int>{4});  // both at once
}

TEST_CASE("stall schedule: of a wait that has just begun there is nothing to tell") {
  REQUIRE(reported_at(seconds(60), 1, seconds(1)).empty());
}

TEST_CASE("stall schedule: a look that comes late reports once") {
  StallSchedule schedule{seconds(10)};
  REQUIRE(schedule.is_due(seconds(95), kPlenty));
  REQUIRE_FALSE(schedule.is_due(seconds(96), kPlenty));
  REQUIRE_FALSE(schedule.is_due(seconds(159), kPlenty));
  REQUIRE(schedule.is_due(seconds(160), kPlenty));
}

TEST_CASE("stall schedule: never with an interval of zero") {
  REQUIRE(reported_at(seconds(0), 100, seconds(100)).empty());
}

TEST_CASE("stall schedule: the first of those that have come reports") {
  const std::vector<int> missing{0, 3};
  REQUIRE(is_first_to_come(1, missing));
  REQUIRE_FALSE(is_first_to_come(2, missing));
  REQUIRE_FALSE(is_first_to_come(4, missing));
  REQUIRE(is_first_to_come(0, std::vector<int>{1, 2}));
}
