#include "shm/data_ring.h"

#include <optional>
#include <random>

#include "catch.h"

using namespace horon;

namespace {

struct Range {
  std::size_t begin;
  std::size_t bytes;
};

bool overlap(const Range& a, const Range& b) {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

}  // namespace

TEST_CASE("data ring: what was given back is taken again, and the rest stays where it is") {
  DataRing ring(4096);
  REQUIRE(ring.most_bytes() == 1024);
  REQUIRE(ring.take(1000) == 0);
  REQUIRE(ring.next(64) == 1024);  // whole lines
  REQUIRE(ring.take(512) == 1024);
  ring.give_back(1024);
  REQUIRE(ring.next(1024) == 1024);
  REQUIRE(ring.take(1024) == 1024);
  REQUIRE(ring.take(1024) == 2048);
  REQUIRE(ring.take(1024) == 3072);
  REQUIRE(ring.take(64) == 0);
}

TEST_CASE("data ring: no piece is where the one before may still be read") {
  std::minstd_rand random(5);
  for (const std::size_t bytes : {std::size_t{256}, std::size_t{4096}, std::size_t{4096 + 64}}) {
    DataRing ring(bytes);
    std::optional<Range> read_by_others;
    for (int i = 0; i < 1000; ++i) {
      const Range piece{0, 1 + random() % ring.most_bytes()};
      const std::size_t begin = ring.next(piece.bytes);
      REQUIRE(ring.take(piece.bytes) == begin);
      const Range taken{begin, piece.bytes};
      REQUIRE(taken.begin + taken.bytes <= bytes);
      REQUIRE_FALSE((read_by_others && overlap(taken, *read_by_others)));
      read_by_others = taken;  // its step is everybody's word that the one before has been read
      if (random() % 2 == 0) {
        ring.give_back(begin);
        read_by_others.reset();
      }
    }
  }
}
