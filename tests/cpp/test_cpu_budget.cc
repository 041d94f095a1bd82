#include "core/cpu_budget.h"

#include <sched.h>

#include "catch.h"
#include "core/error.h"

using namespace horon;

namespace {

CpuBudget budget(std::vector<int> cpus, double quota = 0) {
  CpuBudget made;
  made.cpus = std::move(cpus);
  made.quota = quota;
  return made;
}

}  // namespace

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
