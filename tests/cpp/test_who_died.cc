#include "core/who_died.h"

#include "catch.h"
#include "core/deadline.h"

using namespace horon;

TEST_CASE("a reason names who is known to have died") {
  REQUIRE(with_the_dead("it broke", [] { return std::string("rank 1 died"); }) ==
          "it broke (rank 1 died)");
}

TEST_CASE("a death that is seen only a moment later is waited for") {
  int looks = 0;
  const auto find_dead = [&] { return std::string(++looks < 3 ? "" : "rank 1 died"); };
  REQUIRE(with_the_dead("it broke", find_dead) == "it broke (rank 1 died)");
  REQUIRE(looks == 3);
}

TEST_CASE("a reason stays as it is when nobody died") {
  const Clock::time_point start = Clock::now();
  REQUIRE(with_the_dead("it broke", [] { return std::string(); }) == "it broke");
  REQUIRE(Clock::now() - start < std::chrono::seconds(10));
}
