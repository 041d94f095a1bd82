// How long submissions are gathered: the rules, with made-up times.
#include "named/gathering.h"

#include "catch.h"

using namespace horon;
using namespace std::chrono_literals;

namespace {

// A time at which the test begins.
const Gathering::Clock::time_point kFirstSubmitted{1h};

}  // namespace

TEST_CASE("named gathering: for the time of the first submission, or until there is enough") {
  for (const GatherLimits& limits : {kGather, kGatherInTurn, kGatherOnDevice}) {
    Gathering gathering;
    REQUIRE(gathering.left(kFirstSubmitted) < 0ns);
    gathering.begin(limits, kFirstSubmitted);
    REQUIRE_FALSE(gathering.add(limits, 100));
    REQUIRE(gathering.left(kFirstSubmitted) == limits.time);
    REQUIRE_FALSE(gathering.add(limits, limits.bytes - 101));
    REQUIRE(gathering.left(kFirstSubmitted + limits.time) == 0ns);
    REQUIRE(gathering.add(limits, 1));
    REQUIRE(gathering.left(kFirstSubmitted) < 0ns);
    REQUIRE_FALSE(gathering.add(limits, 1));  // it was said
    REQUIRE(gathering.left(kFirstSubmitted) < 0ns);
    gathering.begin(limits, kFirstSubmitted + 1s);
    REQUIRE_FALSE(gathering.add(limits, 1));
    REQUIRE(gathering.left(kFirstSubmitted + 1s) == limits.time);
  }
}

TEST_CASE("named gathering: what is for a device alone may wait for it, up to a limit") {
  Gathering gathering;
  gathering.begin(kGatherOnDevice, kFirstSubmitted);
  gathering.add(kGatherOnDevice, 1000);
  auto now = kFirstSubmitted + kGatherOnDevice.time;
  REQUIRE_FALSE(gathering.may_wait_for_device(now - 1us));  // it waits anyway
  REQUIRE(gathering.may_wait_for_device(now));
  gathering.wait_for_device(now);
  REQUIRE(gathering.left(now) == kLookAtDeviceEvery);
  REQUIRE_FALSE(gathering.may_wait_for_device(now));
  int looks = 0;
  for (; gathering.may_wait_for_device(now += kLookAtDeviceEvery); ++looks) {
    gathering.wait_for_device(now);
  }
  REQUIRE(looks > 100);
  REQUIRE(now >= kFirstSubmitted + kLongestOnDevice);
  REQUIRE(gathering.left(now) <= 0ns);
}

TEST_CASE("named gathering: what is for the CPU, or enough, does not wait for a device") {
  const auto later = kFirstSubmitted + 2 * kGatherOnDevice.time;
  Gathering gathering;
  REQUIRE_FALSE(gathering.may_wait_for_device(later));
  gathering.begin(kGatherOnDevice, kFirstSubmitted);
  gathering.add(kGatherOnDevice, kGatherOnDevice.bytes);
  REQUIRE_FALSE(gathering.may_wait_for_device(later));
  for (const bool device_first : {true, false}) {
    gathering.begin(device_first ? kGatherOnDevice : kGather, kFirstSubmitted);
    gathering.add(device_first ? kGatherOnDevice : kGather, 1);
    gathering.add(device_first ? kGatherInTurn : kGatherOnDevice, 1);
    REQUIRE_FALSE(gathering.may_wait_for_device(later));
  }
}
