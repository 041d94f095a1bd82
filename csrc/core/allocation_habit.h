// Which of the allocations of something that runs again and again becomes its result. Pure: what
// makes a gradient in a backward pass allocates the same each time, as a rule; see Note [Gradients
// in their places] in torch_backend/gradient_places.h.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace horon {

// Which of a run's allocations.
struct AllocationNumber {
  int node = 0;     // which of those that may make the result
  int in_node = 0;  // by whatever the caller numbers them

  bool operator==(const AllocationNumber&) const = default;
};

// What it has learned about one result. Thread safety: one thread at a time.
class AllocationHabit {
 public:
  // The allocation that will be the result; nothing while that is being learned.
  std::optional<AllocationNumber> number() const { return number_; }

  // Results were so often not where they were expected that it makes no sense to go on.
  bool is_hopeless() const { return n_misses_ >= kMostMisses; }

  // The allocation with this number, in that run, is there: all have to be seen to learn, then only
  // the one that will be the result. What an earlier run has left unfinished is forgotten.
  void see(int run, AllocationNumber number, const void* address);

  // Whether an allocation of that run was seen, of which nothing has been learned yet.
  bool has_seen(int run) const { return run == run_ && !seen_.empty(); }

  // The result of that run lies there; null: nowhere. If that is not where it was expected, it has
  // to be learned again. Without allocations that were seen in it, nothing changes.
  void learn(int run, const void* result);

  // The allocation that should have been the result was not made: it has to be learned again.
  void miss();

 private:
  static constexpr int kMostMisses = 4;

  std::optional<AllocationNumber> number_;
  int n_misses_ = 0;
  int run_ = -1;
  std::vector<std::pair<const void*, AllocationNumber>> seen_;  // in this run: where, which
};

// Counts the allocations of each size in what runs now. Thread safety: one thread at a time.
class AllocationCounter {
 public:
  // How many of that size there were before in this run of that node.
  int next(int run, const void* node, std::size_t bytes);

 private:
  int run_ = -1;
  const void* node_ = nullptr;
  std::vector<std::pair<std::size_t, int>> counts_;
};

}  // namespace horon
