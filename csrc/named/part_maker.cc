#include "named/part_maker.h"

#include <algorithm>
#include <chrono>

#include "core/error.h"

namespace horon {
namespace {

constexpr std::chrono::milliseconds kLookAround{50};

}  // namespace

void PartMaker::make_until(std::size_t bytes) {
  const std::size_t end = std::min(bytes, bytes_);
  while (made_ < end && make_) {
    made_ = make_(made_, end);
  }
}

void PartMaker::finish() {
  struct Tell {
    PartMaker& self;
    ~Tell() {
      self.make_ = nullptr;
      const std::lock_guard lock(self.mutex_);
      self.is_finished_ = true;
      self.changed_.notify_all();
    }
  };
  const Tell tell{*this};
  make_until(bytes_);
}

void PartMaker::await_made(const WaitContext& context) {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookAround, [&] { return is_finished_; })) {
    if (context.deadline.has_passed()) {
      throw TimeoutError("the tensor was not made in time by the thread that has submitted it");
    }
    if (context.check_interrupt != nullptr) {
      lock.unlock();
      (*context.check_interrupt)();
      lock.lock();
    }
  }
}

}  // namespace horon
