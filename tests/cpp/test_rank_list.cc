#include "core/rank_list.h"

#include "catch.h"

using namespace horon;

TEST_CASE("ranks are listed as a person would") {
  REQUIRE(name_ranks({4}) == "rank 4");
  REQUIRE(name_ranks({0, 3}) == "ranks 0 and 3");
  REQUIRE(name_ranks({1, 2, 5}) == "ranks 1, 2 and 5");
  REQUIRE_NOTHROW(name_ranks({}));
}
