#include <random>

#include "catch.h"
#include "core/error.h"
#include "named/wire.h"

using namespace horon;  // NOLINT

namespace {

RequestPtr sample() {
  auto request = std::make_shared<NamedRequest>();
  request->kind = NamedKind::kBroadcast;
  request->op = NamedOp::kAdasum;
  request->prescale = 0.1;
  request->postscale = -3e300;
  request->root = 7;
  request->process_set = 3;
  request->priority = -5;
  request->tensors = {{"a.weight", DType::kBFloat16, 15, 2, {-1, 3, 0}},
                      {"\x01\xff", {}, 6, 4, {}}};
  request->ranks = {0, 2, 1000000};
  return request;
}

std::vector<Decision> decisions() {
  std::vector<Decision> all(7);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].type = static_cast<Decision::Type>(i);
    all[i].request = sample();
    all[i].id = 300;
    all[i].value = -2;
    all[i].name = "x";
    all[i].text = "because";
  }
  return all;
}

Bytes encoded(const std::vector<Decision>& all) {
  std::vector<const Decision*> views;
  for (const Decision& decision : all) {
    views.push_back(&decision);
  }
  return encode(views);
}

}  // namespace

TEST_CASE("named wire: announcements come back as they were") {
  const std::vector<Announcement> sent = {{Announcement::Type::kRequest, kNoId, sample()},
                                          {Announcement::Type::kKnown, 200, nullptr},
                                          {Announcement::Type::kJoin, kNoId, nullptr},
                                          {Announcement::Type::kGoodbye, kNoId, nullptr}};
  const auto got = decode_announcements(encode(sent));
  REQUIRE(got.size() == 4);
  REQUIRE(is_same(*got[0].request, *sample()));
  REQUIRE(got[1].id == 200);
  REQUIRE(got[3].type == Announcement::Type::kGoodbye);
}

TEST_CASE("named wire: a known name costs a few bytes") {
  const std::vector<Announcement> sent(100, {Announcement::Type::kKnown, 5, nullptr});
  REQUIRE(encode(sent).size() == 200);
}

TEST_CASE("named wire: decisions come back as they were") {
  const auto got = decode_decisions(encoded(decisions()));
  REQUIRE(got.size() == 7);
  REQUIRE(got[0].id == 300);
  REQUIRE(is_same(*got[0].request, *sample()));
  REQUIRE(got[1].id == 300);
  REQUIRE(got[2].text == "because");
  REQUIRE(got[3].value == -2);
  REQUIRE(got[4].request->ranks == sample()->ranks);
}

TEST_CASE("named wire: damage is an error or another message, never a crash") {
  const Bytes good = encoded(decisions());
  for (std::size_t length = 1; length < good.size(); ++length) {
    const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length));
    try {
      (void)decode_decisions(cut);
    } catch (const Error&) {
      continue;
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    Bytes bad = good;
    for (int changes = 0; changes < 3; ++changes) {
      bad[random() % bad.size()] = std::byte(random());
    }
    try {
      (void)decode_decisions(bad);
      (void)decode_announcements(bad);
    } catch (const Error&) {
      continue;
    }
  }
}
