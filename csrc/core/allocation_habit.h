// Which of the allocations of something that runs again and again becomes its result. Pure: what
// makes a gradient in a backward pass allocates the same each time, as a rule; see Note [Gradients
// in their places] in torch_backend/gradient_places.h.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace horon {

// What it has learned about one result. Thread safety: one thread at a time.
class AllocationHabit {
 public:
  // The allocation that will be the result; nothing while that is being learned.
  std::optional<int> ordinal() const { return ordinal_; }

  // Results were so often not where they were expected that it makes no sense to go on.
  bool is_hopeless() const { return n_misses_ >= kMostMisses; }

  // The allocation with this number, in that run, is there: all have to be seen to learn, then only
  // the one that will be the result. What an earlier run has left unfinished is forgotten.
  void see(int run, int ordinal, const void* address);

  // The result of that run lies there; null: nowhere. If that is not where it was expected, it has
  // to be learned again. Without allocations that were seen in it, nothing changes.
  void learn(int run, const void* result);

 private:
  static constexpr int kMostMisses = 4;

  std::optional<int> ordinal_;
  int n_misses_ = 0;
  int run_ = -1;
  std::vector<std::pair<const void*, int>> seen_;  // in this run: address, ordinal
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
