#include "core/span_index.h"

#include <algorithm>
#include <random>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

std::vector<std::byte> indexed_memory(64);

ConstSpan span(std::size_t begin, std::size_t bytes) {
  return {indexed_memory.data() + begin, bytes};
}

bool overlap(const ConstSpan& a, const ConstSpan& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

std::vector<std::size_t> found(const SpanIndex& index, const ConstSpan& wanted) {
  std::vector<std::size_t> numbers;
  index.any_overlap(wanted, [&](std::size_t number) {
    numbers.push_back(number);
    return false;
  });
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

}  // namespace

TEST_CASE("span index finds exactly the spans that share bytes") {
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<ConstSpan> spans;
    for (std::size_t i = below(20); i > 0; --i) {
      const std::size_t begin = below(64);
      spans.push_back(span(begin, below(std::min<std::size_t>(65 - begin, 24))));
    }
    const std::size_t begin = below(64);
    const ConstSpan wanted = span(begin, below(65 - begin));
    std::vector<std::size_t> expected;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      if (overlap(spans[i], wanted)) {
        expected.push_back(i);
      }
    }
    REQUIRE(found(SpanIndex(spans), wanted) == expected);
  }
}

TEST_CASE("span index stops at the first span that matters") {
  const std::vector<ConstSpan> spans = {span(0, 8), span(4, 8), span(32, 8)};
  const SpanIndex index(spans);
  CHECK(index.any_overlap(span(6, 1), [](std::size_t number) { return number == 0; }));
  CHECK(index.any_overlap(span(6, 1), [](std::size_t number) { return number == 1; }));
  CHECK_FALSE(index.any_overlap(span(6, 1), [](std::size_t number) { return number == 2; }));
  CHECK_FALSE(index.any_overlap(span(12, 20), [](std::size_t) { return true; }));
  CHECK_FALSE(index.any_overlap({nullptr, 0}, [](std::size_t) { return true; }));
  CHECK_FALSE(SpanIndex(std::vector<ConstSpan>()).any_overlap(span(0, 8), [](std::size_t) {
    return true;
  }));
}
