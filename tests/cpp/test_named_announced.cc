#include "catch.h"
#include "named/announced.h"

using namespace horon;  // NOLINT

namespace {

Announced::Operation operation(const std::string& key) {
  auto made = std::make_shared<NamedOperation>();
  made->own_keys = {NamedKey(key)};
  return made;
}

}  // namespace

TEST_CASE("named announced: found by number or by key, once") {
  Announced announced;
  REQUIRE(announced.empty());
  const auto plain = operation("a");
  const auto known = operation("b");
  announced.add(plain, kNoId);
  announced.add(known, 7);
  REQUIRE_FALSE(announced.empty());
  REQUIRE(announced.take(RequestId{6}) == nullptr);
  REQUIRE(announced.take(RequestId{700}) == nullptr);
  REQUIRE(announced.take("c") == nullptr);
  REQUIRE(announced.take(RequestId{7}) == known);
  REQUIRE(announced.take(RequestId{7}) == nullptr);
  REQUIRE(announced.take("a") == plain);
  REQUIRE(announced.take("a") == nullptr);
  REQUIRE(announced.empty());
}

TEST_CASE("named announced: what has a number is found by its key, too") {
  // The ranks disagree, and the coordinator's verdict carries the name.
  Announced announced;
  const auto known = operation("b");
  announced.add(known, 3);
  announced.add(operation("other"), 4);
  REQUIRE(announced.take("b") == known);
  REQUIRE(announced.take(RequestId{3}) == nullptr);
  REQUIRE_FALSE(announced.empty());
}

TEST_CASE("named announced: all at once") {
  Announced announced;
  announced.add(operation("a"), kNoId);
  announced.add(operation("b"), 0);
  announced.add(operation("c"), 1000);
  REQUIRE(announced.take_all().size() == 3);
  REQUIRE(announced.empty());
  REQUIRE(announced.take_all().empty());
}
