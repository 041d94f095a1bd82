#include "core/monitored_barrier.h"

#include "catch.h"

using namespace horon;
using std::chrono::milliseconds;

TEST_CASE("rank 0 of a monitored barrier gives up first") {
  const milliseconds timeout(1500);
  REQUIRE(monitored_barrier_timeout(timeout, 0) == timeout);
  REQUIRE(monitored_barrier_timeout(timeout, 1) > timeout);
  REQUIRE(monitored_barrier_timeout(timeout, 7) == monitored_barrier_timeout(timeout, 1));
}

TEST_CASE("the texts of a monitored barrier are those of Gloo") {
  struct Row {
    std::vector<int> missing;
    bool all_ranks;
    int timeout_ms;
    std::string text;
  };
  const std::string hint = " Pass wait_all_ranks=True to hear of all ranks that are missing.";
  for (const Row& row : {
           Row{{1},
               false,
               1000,
               "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms." + hint},
           Row{{1, 3},
               false,
               20,
               "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 20 ms." + hint},
           Row{{3}, true, 20, "[Rank 0]: Rank 3 failed to pass monitoredBarrier in 20 ms."},
           Row{{1, 2, 4},
               true,
               20,
               "[Rank 0]: Ranks 1, 2, 4 failed to pass monitoredBarrier in 20 ms."},
           Row{{1, 2}, true, 0, "Rank 0 timed out in monitoredBarrier after 0 ms."},
           Row{{1}, false, 0, "Rank 0 timed out in monitoredBarrier after 0 ms."},
       }) {
    REQUIRE(monitored_barrier_timeout_text(row.missing, row.all_ranks,
                                           milliseconds(row.timeout_ms)) == row.text);
  }
  // Nobody missing (it came in the last moment) must not read beyond the list.
  REQUIRE_FALSE(monitored_barrier_timeout_text({}, false, milliseconds(5)).empty());
  REQUIRE_FALSE(monitored_barrier_timeout_text({}, true, milliseconds(5)).empty());
}

TEST_CASE("the others tell that they were there, and what happened") {
  REQUIRE(monitored_barrier_refused_text(2, "because") ==
          "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
          "send/recv from rank 0: because");
}
