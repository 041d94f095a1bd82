#include "core/pending_writes.h"

#include <array>
#include <random>

#include "catch.h"

using namespace horon;

namespace {

std::array<std::byte, 1000> written_memory;

ConstSpan input_at(std::size_t begin, std::size_t bytes) {
  return {written_memory.data() + begin, bytes};
}
Span output_at(std::size_t begin, std::size_t bytes) {
  return {written_memory.data() + begin, bytes};
}

Request reads(std::initializer_list<ConstSpan> inputs) {
  Request request;
  request.inputs = inputs;
  return request;
}

Request writes(std::initializer_list<Span> outputs) {
  Request request;
  request.outputs = outputs;
  return request;
}

}  // namespace

TEST_CASE("pending writes: nothing overlaps when nothing is pending") {
  const PendingWrites pending;
  REQUIRE_FALSE(pending.overlaps_inputs(reads({input_at(0, 100)})));
  REQUIRE_FALSE(pending.overlaps_inputs(Request()));
}

TEST_CASE("pending writes: an overlap by one byte counts, neighbours do not") {
  struct Case {
    std::size_t begin;
    std::size_t bytes;
    bool overlaps;
  };
  for (const Case& c :
       {Case{0, 100, false}, Case{0, 101, true}, Case{199, 1, true}, Case{200, 10, false},
        Case{120, 10, true}, Case{50, 500, true}, Case{100, 100, true}, Case{150, 0, false}}) {
    PendingWrites pending;
    pending.push(writes({output_at(100, 100)}));
    INFO("input at " << c.begin << " of " << c.bytes);
    REQUIRE(pending.overlaps_inputs(reads({input_at(c.begin, c.bytes)})) == c.overlaps);
    // Any input of several.
    REQUIRE(pending.overlaps_inputs(reads({input_at(900, 10), input_at(c.begin, c.bytes)})) ==
            c.overlaps);
  }
}

TEST_CASE("pending writes: outputs in several places count as one, empty ones not at all") {
  PendingWrites pending;
  pending.push(writes({output_at(300, 10), output_at(0, 0), output_at(100, 10), Span{}}));
  REQUIRE(pending.overlaps_inputs(reads({input_at(100, 1)})));
  REQUIRE(pending.overlaps_inputs(reads({input_at(309, 1)})));
  REQUIRE(pending.overlaps_inputs(reads({input_at(200, 1)})));  // between: may be, not must be
  REQUIRE_FALSE(pending.overlaps_inputs(reads({input_at(0, 100)})));
  REQUIRE_FALSE(pending.overlaps_inputs(reads({input_at(310, 1)})));
}

TEST_CASE("pending writes: an operation without outputs takes its place in the order") {
  PendingWrites pending;
  pending.push(Request());
  pending.push(writes({output_at(0, 10)}));
  pending.push(writes({output_at(50, 10)}));
  REQUIRE(pending.overlaps_inputs(reads({input_at(0, 1)})));
  pending.pop();
  REQUIRE(pending.overlaps_inputs(reads({input_at(0, 1)})));
  pending.pop();
  REQUIRE_FALSE(pending.overlaps_inputs(reads({input_at(0, 1)})));
  REQUIRE(pending.overlaps_inputs(reads({input_at(50, 1)})));
  pending.pop();
  REQUIRE_FALSE(pending.overlaps_inputs(reads({input_at(50, 1)})));
}

TEST_CASE("pending writes: random ranges, against byte by byte") {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    PendingWrites pending;
    std::deque<std::pair<std::size_t, std::size_t>> reference;  // begin, end
    for (int step = 0; step < 50; ++step) {
      const std::size_t begin = random() % 900;
      const std::size_t bytes = random() % 40;
      if (random() % 3 != 0) {
        pending.push(writes({output_at(begin, bytes)}));
        reference.emplace_back(begin, begin + bytes);
      } else if (!reference.empty()) {
        pending.pop();
        reference.pop_front();
      }
      const std::size_t from = random() % 900;
      const std::size_t to = from + random() % 40;
      bool expected = false;
      for (const auto& [first, last] : reference) {
        expected = expected || (std::max(first, from) < std::min(last, to));
      }
      REQUIRE(pending.overlaps_inputs(reads({input_at(from, to - from)})) == expected);
    }
  }
}
