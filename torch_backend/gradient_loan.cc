#include "gradient_loan.h"

#include <utility>

namespace horon::torch_backend {

c10::DataPtr GradientLoan::lend(void* address, c10::Storage memory, c10::Device device) {
  const std::lock_guard lock(mutex_);
  memory_ = std::move(memory);
  self_ = shared_from_this();
  is_settled_.store(false, std::memory_order_relaxed);
  address_.store(address, std::memory_order_release);
  return {address, this, &give_back, device};
}

void GradientLoan::keep(c10::Storage memory) {
  const std::lock_guard lock(mutex_);
  if (self_) {
    std::swap(memory_, memory);  // the old one dies after the lock
  }
}

c10::Storage GradientLoan::memory() {
  const std::lock_guard lock(mutex_);
  return memory_;
}

void GradientLoan::give_back(void* loan) {
  auto* const given = static_cast<GradientLoan*>(loan);
  std::shared_ptr<GradientLoan> self;  // these die after the lock
  c10::Storage memory;
  const std::lock_guard lock(given->mutex_);
  memory = std::move(given->memory_);
  self = std::move(given->self_);
  given->address_.store(nullptr, std::memory_order_release);
}

}  // namespace horon::torch_backend
