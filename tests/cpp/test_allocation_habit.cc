// Which allocation becomes the result: by made-up runs.
#include "core/allocation_habit.h"

#include <array>

#include "catch.h"

using namespace horon;

namespace {

const std::array<char, 8> kMemory{};

const void* at(int i) { return &kMemory.at(static_cast<std::size_t>(i)); }

// A run in which the allocations are at 0, 1, 2, ..., and the result at one of these, or elsewhere.
void run(AllocationHabit& habit, int number, int n_allocations, const void* result) {
  for (int i = 0; i < n_allocations; ++i) {
    if (const AllocationNumber one{0, i}; !habit.number() || habit.number() == one) {
      habit.see(number, one, at(i));
    }
  }
  habit.learn(number, result);
}

}  // namespace

TEST_CASE("allocation habit: learned by the first run") {
  for (int result = 0; result < 3; ++result) {
    AllocationHabit habit;
    REQUIRE_FALSE(habit.number());
    for (int number = 1; number < 20; ++number) {
      run(habit, number, 3, at(result));
      REQUIRE(habit.number() == AllocationNumber{0, result});
    }
    REQUIRE_FALSE(habit.is_hopeless());
  }
}

TEST_CASE(
    "allocation habit: another one is learned by the next run, too many changes are hopeless") {
  AllocationHabit habit;
  for (int change = 0; change < 4; ++change) {
    REQUIRE_FALSE(habit.is_hopeless());
    run(habit, 3 * change, 2, at(change % 2));
    run(habit, 3 * change + 1, 2, at(change % 2));
    REQUIRE(habit.number() == AllocationNumber{0, change % 2});
    run(habit, 3 * change + 2, 2, at(1 - change % 2));
    REQUIRE_FALSE(habit.number());
  }
  REQUIRE(habit.is_hopeless());
}

TEST_CASE("allocation habit: results from elsewhere are hopeless") {
  for (const void* result : {at(7), static_cast<const void*>(nullptr)}) {
    AllocationHabit habit;
    for (int number = 0; number < 4; ++number) {
      REQUIRE_FALSE(habit.is_hopeless());
      run(habit, number, 2, result);
      REQUIRE_FALSE(habit.number());
    }
    REQUIRE(habit.is_hopeless());
  }
}

TEST_CASE("allocation habit: the last one at an address counts") {
  AllocationHabit habit;
  habit.see(1, {0, 0}, at(3));  // and freed
  habit.see(1, {0, 1}, at(3));
  habit.learn(1, at(3));
  REQUIRE(habit.number() == AllocationNumber{0, 1});
}

TEST_CASE(
    "allocation habit: nothing is learned of a run without allocations, or of an unfinished one") {
  AllocationHabit habit;
  for (int i = 0; i < 10; ++i) {
    habit.learn(i, at(0));
  }
  REQUIRE_FALSE(habit.is_hopeless());
  habit.see(1, {0, 0}, at(0));  // fails
  habit.see(2, {0, 5}, at(1));
  habit.learn(2, at(0));
  REQUIRE_FALSE(habit.number());
}

TEST_CASE("allocation habit: what one run has allocated says nothing of another one's result") {
  AllocationHabit habit;
  run(habit, 0, 3, at(2));
  for (int number = 1; number < 20; ++number) {
    habit.see(2 * number, {0, 2}, at(2));  // the result, as expected: not said
    habit.learn(2 * number + 1, at(5));    // the next run allocates nothing
    REQUIRE(habit.number() == AllocationNumber{0, 2});
  }
  REQUIRE_FALSE(habit.is_hopeless());
}

TEST_CASE("allocation habit: nodes that make parts of the result are told apart") {
  AllocationHabit habit;
  for (int number = 1; number < 20; ++number) {
    for (int node = 0; node < 3; ++node) {
      const AllocationNumber one{node, 0};
      if (!habit.number() || habit.number() == one) {
        habit.see(number, one, at(number % 2 + node));
      }
    }
    habit.learn(number, at(number % 2 + 2));
    REQUIRE(habit.number() == AllocationNumber{2, 0});
  }
  REQUIRE_FALSE(habit.is_hopeless());
}

TEST_CASE("allocation habit: what is not made any more is learned again") {
  AllocationHabit habit;
  for (int change = 0; change < 4; ++change) {
    REQUIRE_FALSE(habit.is_hopeless());
    run(habit, change, 3, at(2));
    REQUIRE(habit.number() == AllocationNumber{0, 2});
    habit.miss();
    REQUIRE_FALSE(habit.number());
  }
  REQUIRE(habit.is_hopeless());
}

TEST_CASE("allocation counter: by size, from 0 in each node of each run") {
  AllocationCounter counter;
  REQUIRE(counter.next(1, at(0), 100) == 0);
  REQUIRE(counter.next(1, at(0), 100) == 1);
  REQUIRE(counter.next(1, at(0), 200) == 0);
  REQUIRE(counter.next(1, at(0), 100) == 2);
  REQUIRE(counter.next(1, at(1), 100) == 0);
  REQUIRE(counter.next(1, at(0), 100) == 0);  // another node has run between
  REQUIRE(counter.next(2, at(0), 100) == 0);
  REQUIRE(counter.next(2, at(0), 200) == 0);
}
