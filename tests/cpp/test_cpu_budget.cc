#include "core/cpu_budget.h"

#include <sched.h>

#include <map>
#include <string>

#include "catch.h"
#include "core/error.h"
#include "fake_cgroups.h"

using namespace horon;
using namespace horon::testing;

namespace {

CpuBudget budget(std::vector<int> cpus, double quota = 0) {
  CpuBudget made;
  made.cpus = std::move(cpus);
  made.quota = quota;
  return made;
}

// What cgroup_quota() finds where the system says this.
double quota_of(const std::string& membership, const std::map<std::string, std::string>& files) {
  const FakeCgroups cgroups(membership, files);
  return cgroup_quota(cgroups.membership(), cgroups.mount());
}

}  // namespace

TEST_CASE("cpu budget: quotas of cgroups, version 2") {
  CHECK(quota_of("0::/\n", {}) == 0);
  CHECK(quota_of("0::/\n", {{"cpu.max", "max 100000\n"}}) == 0);
  CHECK(quota_of("0::/\n", {{"cpu.max", "150000 100000\n"}}) == 1.5);
  CHECK(quota_of("0::/a/b\n", {{"a/b/cpu.max", "200000 100000\n"}}) == 2);
  // The tightest of all levels.
  CHECK(quota_of("0::/a/b\n", {{"a/b/cpu.max", "200000 100000\n"},
                               {"a/cpu.max", "50000 100000\n"},
                               {"cpu.max", "max 100000\n"}}) == 0.5);
  // The path of the host, in a container.
  CHECK(quota_of("0::/docker/c0ffee\n", {{"cpu.max", "100000 50000\n"}}) == 2);
}

TEST_CASE("cpu budget: quotas of cgroups, version 1") {
  const std::string membership = "9:name=systemd:/\n4:cpuset:/x\n3:cpuacct,cpu:/a/b\n0::/\n";
  CHECK(quota_of(membership, {}) == 0);
  CHECK(quota_of(membership, {{"cpu/a/b/cpu.cfs_quota_us", "-1\n"},
                              {"cpu/a/b/cpu.cfs_period_us", "100000\n"}}) == 0);
  CHECK(quota_of(membership, {{"cpu/a/b/cpu.cfs_quota_us", "150000\n"},
                              {"cpu/a/b/cpu.cfs_period_us", "100000\n"}}) == 1.5);
  CHECK(quota_of(membership, {{"cpu/cpu.cfs_quota_us", "100000\n"},
                              {"cpu/cpu.cfs_period_us", "100000\n"}}) == 1);
  CHECK(quota_of("4:cpuset:/a/b\n", {{"cpu/a/b/cpu.cfs_quota_us", "150000\n"},
                                     {"cpu/a/b/cpu.cfs_period_us", "100000\n"}}) == 0);
}

TEST_CASE("cpu budget: what the system says can be nonsense") {
  for (const char* membership : {"", "\n", "0", "0:", "0::", "0::a", ":::", "x:cpu:"}) {
    INFO(membership);
    CHECK(quota_of(membership, {{"cpu.max", "oops\n"}, {"cpu/cpu.cfs_quota_us", "-\n"}}) == 0);
  }
  CHECK(quota_of("0::/\n", {{"cpu.max", "100000 0\n"}}) == 0);
}

TEST_CASE("cpu budget: text and back") {
  for (const CpuBudget& original :
       {budget({0}), budget({0, 1, 5}), budget({3}, 1.5), budget({0, 127, 1023}, 0.25)}) {
    const CpuBudget copy = CpuBudget::decode(original.encode());
    REQUIRE(copy.cpus == original.cpus);
    REQUIRE(copy.quota == original.quota);
  }
  REQUIRE(budget({0, 1, 5}, 1.5).encode() == "0,1,5;1.5");
}

TEST_CASE("cpu budget: anything else is an error") {
  for (const char* text : {"", ";", "0", "0,1", "0;", "0,;1", "x;1", "0;x", ",0;1", "0 1;2",
                           "0.5;1", "0;1x", "0;1;1", "0,1;2 3", "-1;1", "0;-1"}) {
    INFO(text);
    REQUIRE_THROWS_AS(CpuBudget::decode(text), Error);
  }
}

TEST_CASE("cpu budget: what processes can use together") {
  struct Case {
    std::vector<CpuBudget> budgets;
    double cpus;
  };
  for (const Case& c : {
           Case{{budget({0, 1}), budget({0, 1})}, 2},              // the whole machine, both
           Case{{budget({0}), budget({1})}, 2},                    // pinned apart
           Case{{budget({0}), budget({0})}, 1},                    // pinned together
           Case{{budget({0, 1, 2}), budget({2, 3})}, 4},           // overlapping
           Case{{budget({0, 1}, 1.5), budget({0, 1}, 1.5)}, 1.5},  // one container
           Case{{budget({0, 1}, 8), budget({0, 1}, 8)}, 2},        // a quota beyond the CPUs
           Case{{budget({0, 1, 2, 3}, 3), budget({0, 1, 2, 3}, 2)}, 2},
           Case{{budget({0, 1, 2, 3}), budget({0, 1, 2, 3}, 2)}, 2},  // only one has a limit
       }) {
    REQUIRE(common_cpus(c.budgets) == c.cpus);
  }
}

TEST_CASE("cpu budget: this process's") {
  const CpuBudget own = own_cpu_budget();
  REQUIRE_FALSE(own.cpus.empty());
  REQUIRE(own.quota >= 0);
  REQUIRE(CpuBudget::decode(own.encode()).cpus == own.cpus);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    REQUIRE(own.cpus.size() == static_cast<std::size_t>(CPU_COUNT(&allowed)));
  }
}
