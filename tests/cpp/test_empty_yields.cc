#include "catch.h"
#include "shm/empty_yields.h"

namespace horon {
namespace {

// What the looks after `yields` yields say, each of which loses the core `losses_per_yield` times.
bool are_empty_after(int yields, long losses_per_yield) {
  EmptyYields empty;
  bool are_empty = false;
  long losses = 1000;  // of waits before this one
  for (int i = 0; i < yields; ++i) {
    losses += losses_per_yield;
    if (empty.is_look_due()) {
      are_empty = are_empty || empty.look(losses);
    }
  }
  return are_empty;
}

}  // namespace

TEST_CASE("empty yields: two looks are needed", "[empty_yields]") {
  REQUIRE_FALSE(are_empty_after(2 * EmptyYields::kPerLook - 1, 0));
  REQUIRE(are_empty_after(2 * EmptyYields::kPerLook, 0));
}

TEST_CASE("empty yields: not while the core is handed on", "[empty_yields]") {
  REQUIRE_FALSE(are_empty_after(100 * EmptyYields::kPerLook, 1));
}

TEST_CASE("empty yields: one that was not is enough to go on for another look", "[empty_yields]") {
  EmptyYields empty;
  REQUIRE_FALSE(empty.look(0));
  REQUIRE_FALSE(empty.look(1));
  REQUIRE(empty.look(1));
}

}  // namespace horon
