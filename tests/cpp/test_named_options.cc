#include "named/named_options.h"

#include <cstdlib>
#include <string>

#include "catch.h"

using namespace horon;

namespace {

// A variable for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

}  // namespace

TEST_CASE("named options: both prefixes are read, and horon's wins") {
  const auto threshold = [] { return NamedOptions::from_environment().fusion.threshold_bytes; };
  const auto by_default = threshold();
  const Variable horovod("HOROVOD_FUSION_THRESHOLD", "1000");
  REQUIRE(by_default != 1000);
  REQUIRE(threshold() == 1000);
  const Variable horon("HORON_FUSION_THRESHOLD", "2000");
  REQUIRE(threshold() == 2000);
  const Variable empty("HORON_FUSION_THRESHOLD", "");
  REQUIRE(threshold() == 1000);
}

TEST_CASE("named options: times, switches and interfaces") {
  const NamedOptions defaults = NamedOptions::from_environment();
  REQUIRE(defaults.stall_check == std::chrono::seconds(60));
  REQUIRE(defaults.stall_shutdown == std::chrono::seconds(0));
  REQUIRE_FALSE(defaults.join_everything);
  const Variable check("HOROVOD_STALL_CHECK_TIME_SECONDS", "7");
  const Variable shutdown("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "99999999999999");
  const Variable join("HORON_JOIN_ALL_OPERATIONS", "1");
  const Variable interfaces("HOROVOD_GLOO_IFACE", "lo,eth7");
  const NamedOptions options = NamedOptions::from_environment();
  REQUIRE(options.stall_check == std::chrono::seconds(7));
  REQUIRE(options.stall_shutdown == std::chrono::hours(365 * 24));  // bounded
  REQUIRE(options.join_everything);
  REQUIRE(options.interfaces == "lo,eth7");
  const Variable off("HOROVOD_STALL_CHECK_DISABLE", "1");
  REQUIRE(NamedOptions::from_environment().stall_check == std::chrono::seconds(0));
}

TEST_CASE("named options: whole numbers may have a point, and switches may be words") {
  const Variable check("HOROVOD_STALL_CHECK_TIME_SECONDS", "60.0");
  REQUIRE(NamedOptions::from_environment().stall_check == std::chrono::seconds(60));
  {
    const Variable off("HOROVOD_STALL_CHECK_DISABLE", "True");
    REQUIRE(NamedOptions::from_environment().stall_check == std::chrono::seconds(0));
  }
  const Variable off("HOROVOD_STALL_CHECK_DISABLE", "no");
  REQUIRE(NamedOptions::from_environment().stall_check == std::chrono::seconds(60));
  const Variable nonsense("HORON_STALL_CHECK_DISABLE", "maybe");
  REQUIRE_THROWS_WITH(NamedOptions::from_environment(),
                      "HORON_STALL_CHECK_DISABLE: expected a number of 0 or 1, got 'maybe'.");
}

TEST_CASE("named options: what is no number is an error that names the variable") {
  for (const char* value : {"64MB", "-1", "1.5", "0x10", " 1"}) {
    const Variable variable("HOROVOD_FUSION_THRESHOLD", value);
    REQUIRE_THROWS_WITH(
        NamedOptions::from_environment(),
        std::string("HOROVOD_FUSION_THRESHOLD: expected a number of bytes, got '") + value + "'.");
  }
}

TEST_CASE("named options: knobs of Horovod's that mean nothing here get a line each") {
  REQUIRE(knobs_without_meaning().empty());
  const Variable cycle("HOROVOD_CYCLE_TIME", "5");
  const Variable unset("HOROVOD_AUTOTUNE", "");
  const auto lines = knobs_without_meaning();
  REQUIRE(lines.size() == 1);
  REQUIRE(lines[0].find("HOROVOD_CYCLE_TIME has no effect") == 0);
}
