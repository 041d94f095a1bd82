#include "core/rank_list.h"

#include "catch.h"

using namespace horon;

TEST_CASE("ranks are listed as a person would") {
  REQUIRE(name_ranks({4}) == "rank 4");
  REQUIRE(name_ranks({0, 3}) == "ranks 0 and 3");
  REQUIRE(name_ranks({1, 2, 5}) == "ranks 1, 2 and 5");
  REQUIRE_NOTHROW(name_ranks({}));
}

TEST_CASE("ranks of a part are listed with what they are in the whole") {
  REQUIRE(name_ranks({1}, {0, 2}) == "rank 1 (global rank 2)");
  REQUIRE(name_ranks({0, 1}, {3, 7}) == "ranks 0 and 1 (global ranks 3 and 7)");
  REQUIRE(name_ranks({0}, {0, 2}) == "rank 0");
  REQUIRE(name_ranks({0, 1}, {}) == "ranks 0 and 1");
}
