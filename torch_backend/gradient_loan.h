// What autograd has made in a gradient's place, from its allocation until it is freed.
//
// Note [Loans]
// An allocator may be asked for a place hundreds of times in a backward pass, so a loan is an
// object that the place has for good: lending needs no memory of its own and nothing has to be
// looked up when it ends, since what was lent knows its loan.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace horon::torch_backend {

// Made by std::make_shared; lives at least as long as what was lent. Thread safety: all methods.
class GradientLoan : public std::enable_shared_from_this<GradientLoan> {
 public:
  // Where it is out; null: it is not.
  void* address() const { return address_.load(std::memory_order_acquire); }

  // Whether something lies there that is not known to be the gradient. See settle().
  bool is_unsettled_at(const void* place) const {
    return place != nullptr && address() == place && !is_settled_.load(std::memory_order_relaxed);
  }

  // What was lent has become a view of the place, and what is left of it will not be read.
  void settle() { is_settled_.store(true, std::memory_order_relaxed); }

  // For an allocator to hand out. `memory` keeps it until it is freed. Requires that it is not out.
  c10::DataPtr lend(void* address, c10::Storage memory, c10::Device device);

  // From now on this keeps it, if it is out.
  void keep(c10::Storage memory);

  // What keeps it; null: it is not out.
  c10::Storage memory();

  // The loan of what an allocator has handed out; null: it is none's.
  static GradientLoan* of(const c10::DataPtr& lent) {
    return lent.get_deleter() == &give_back ? static_cast<GradientLoan*>(lent.get_context())
                                            : nullptr;
  }

 private:
  static void give_back(void* loan);

  std::atomic<void*> address_{nullptr};
  std::atomic<bool> is_settled_{false};
  std::mutex mutex_;
  c10::Storage memory_;                 // guarded by mutex_
  std::shared_ptr<GradientLoan> self_;  // while it is out; guarded by mutex_
};

}  // namespace horon::torch_backend
