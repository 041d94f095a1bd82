#include "core/inline_vector.h"

#include <cstdint>
#include <random>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

using Small = InlineVector<std::uint64_t, 4>;

Small filled(std::size_t size) {
  Small values;
  for (std::size_t i = 0; i < size; ++i) {
    values.push_back(100 + i);
  }
  return values;
}

bool is_inside(const Small& values) {
  const auto* begin = reinterpret_cast<const std::byte*>(&values);
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  return data >= begin && data < begin + sizeof(Small);
}

void require_filled(const Small& values, std::size_t size) {
  REQUIRE(values.size() == size);
  REQUIRE(values.empty() == (size == 0));
  for (std::size_t i = 0; i < size; ++i) {
    REQUIRE(values[i] == 100 + i);
  }
}

}  // namespace

TEST_CASE("inline vector: the first few values lie inside") {
  for (std::size_t size = 0; size <= 9; ++size) {
    const Small values = filled(size);
    require_filled(values, size);
    REQUIRE(is_inside(values) == (size <= 4));
    if (size > 0) {
      REQUIRE(values.back() == 100 + size - 1);
    }
  }
}

TEST_CASE("inline vector: copies and moves between every pair of sizes") {
  for (std::size_t from = 0; from <= 9; ++from) {
    const Small source = filled(from);
    const Small copy(source);
    require_filled(copy, from);
    Small moved_from = source;
    const Small moved(std::move(moved_from));
    require_filled(moved, from);
    for (std::size_t to = 0; to <= 9; ++to) {
      Small copied_over = filled(to);
      copied_over = source;
      require_filled(copied_over, from);
      Small giver = source;
      Small taker = filled(to);
      taker = std::move(giver);
      require_filled(taker, from);
      // What was moved from is empty, and may be used again, whatever it held before.
      REQUIRE(giver.empty());  // NOLINT(bugprone-use-after-move): that is the test
      for (std::size_t i = 0; i < to; ++i) {
        giver.push_back(100 + i);
      }
      require_filled(giver, to);
      require_filled(taker, from);
    }
    require_filled(source, from);
  }
}

TEST_CASE("inline vector: assignment to itself changes nothing") {
  for (const std::size_t size : {0, 3, 7}) {
    Small values = filled(size);
    const Small& same = values;
    values = same;
    require_filled(values, size);
    Small& self = values;
    values = std::move(self);
    require_filled(values, size);
  }
}

TEST_CASE("inline vector: a value of its own may be appended while it grows") {
  Small values = filled(4);
  values.push_back(values[1]);  // goes over to the heap
  REQUIRE(values.back() == 101);
  for (int i = 0; i < 20; ++i) {
    values.push_back(values[0]);
    REQUIRE(values.back() == 100);
  }
  values.resize(40, values[2]);
  REQUIRE(values.size() == 40);
  REQUIRE(values.back() == 102);
  values.assign(50, values[3]);
  REQUIRE(values.size() == 50);
  REQUIRE(values[0] == 103);
  REQUIRE(values.back() == 103);
}

TEST_CASE("inline vector: sizes and lists") {
  REQUIRE(Small(3).size() == 3);
  REQUIRE(Small(3) == Small{0, 0, 0});
  REQUIRE(Small(6, 9) == Small{9, 9, 9, 9, 9, 9});
  REQUIRE_FALSE(Small{1, 2} == Small{1, 2, 3});
  REQUIRE_FALSE(Small{1, 2} == Small{1, 3});
  REQUIRE(Small() == Small{});
  const std::vector<std::uint64_t> more{5, 6, 7, 8, 9};
  Small values{1};
  values.assign(more.begin(), more.end());
  REQUIRE(values == Small{5, 6, 7, 8, 9});
  values.clear();
  REQUIRE(values.empty());
  REQUIRE(values.begin() == values.end());
}

TEST_CASE("inline vector: random changes, against std::vector") {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    Small values;
    std::vector<std::uint64_t> reference;
    for (int step = 0; step < 60; ++step) {
      const std::uint64_t value = random();
      switch (random() % 5) {
        case 0:
        case 1:
          values.push_back(value);
          reference.push_back(value);
          break;
        case 2: {
          const std::size_t size = random() % 12;
          values.resize(size, value);
          reference.resize(size, value);
          break;
        }
        case 3: {
          Small other = values;
          values.clear();
          values = std::move(other);
          break;
        }
        default: {
          const Small other = values;
          values = other;
        }
      }
      REQUIRE(std::vector<std::uint64_t>(values.begin(), values.end()) == reference);
    }
  }
}
