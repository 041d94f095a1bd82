#include "shm/paired_choice.h"

#include "catch.h"
#include "shm/shared_store.h"

using namespace horon;  // NOLINT

namespace {

// Does so many parts, of which a byte takes `usual` or `other` nanoseconds; returns how many were
// done the other way.
int run(PairedChoice& choice, int parts, double usual, double other) {
  int others = 0;
  for (int i = 0; i < parts; ++i) {
    const PairedChoice::Turn turn = choice.next();
    others += turn.other ? 1 : 0;
    choice.done(turn.is_timed ? (turn.other ? other : usual) : 0);
  }
  return others;
}

bool prefers_other(PairedChoice choice) {
  PairedChoice::Turn turn = choice.next();
  while (turn.is_timed) {
    choice.done(1);
    turn = choice.next();
  }
  return turn.other;
}

}  // namespace

TEST_CASE("paired choice: the faster way is found, and found again") {
  PairedChoice choice;
  REQUIRE_FALSE(prefers_other(choice));
  run(choice, 200, 2, 1);
  REQUIRE(prefers_other(choice));
  run(choice, 300, 1, 2);
  REQUIRE_FALSE(prefers_other(choice));
  run(choice, 200, 2, 1);
  REQUIRE(prefers_other(choice));
}

TEST_CASE("paired choice: few parts are done the other way while the usual one is faster") {
  for (const double other : {1.0, 1.1, 2.0, 1e9}) {
    PairedChoice choice;
    REQUIRE(run(choice, 3200, 1, other) <= 3200 / 32 + 1);
    REQUIRE_FALSE(prefers_other(choice));
  }
}

TEST_CASE("paired choice: one interrupted part changes nothing, nor one that took no time") {
  PairedChoice choice;
  const auto one_pair = [&](double first, double second) {
    PairedChoice::Turn turn = choice.next();
    while (!turn.is_timed) {
      choice.done();
      turn = choice.next();
    }
    choice.done(first);
    REQUIRE(choice.next().is_timed);
    REQUIRE(choice.next().other != turn.other);
    choice.done(second);
    REQUIRE_FALSE(choice.next().is_timed);
  };
  for (int i = 0; i < 5; ++i) {
    one_pair(1e9, 1);
    REQUIRE_FALSE(prefers_other(choice));
    one_pair(0, 1);
    one_pair(1, 0);
    for (int quiet = 0; quiet < 20; ++quiet) {
      one_pair(1, 1);
    }
    REQUIRE_FALSE(prefers_other(choice));
  }
}

TEST_CASE("paired choice: which way comes first takes turns") {
  PairedChoice choice;
  int others_first = 0;
  for (int pair = 0; pair < 10; ++pair) {
    while (!choice.next().is_timed) {
      choice.done();
    }
    others_first += choice.next().other ? 1 : 0;
    choice.done(1);
    choice.done(1);
  }
  REQUIRE(others_first == 5);
}

TEST_CASE("shared store: small parts are not asked for, large ones now and then") {
  SharedStore store;
  int small = 0;
  int large = 0;
  for (int i = 0; i < 1000; ++i) {
    store.store_part(1000, [&](bool asks) { small += asks ? 1 : 0; });
    store.store_part(1 << 17, [&](bool asks) { large += asks ? 1 : 0; });
  }
  REQUIRE(small == 0);
  REQUIRE(large > 0);
}
