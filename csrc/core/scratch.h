// Memory for what a call needs for a while, kept for the next one. Its contents are anything: what
// is about to be written over is not cleared first, and pages are taken from the system once.
#pragma once

#include <cstddef>
#include <memory>

namespace horon {

class Scratch {
 public:
  // At least so many bytes (never null); what they were before is lost if it grows.
  std::byte* need(std::size_t bytes) {
    if (!data_ || bytes > capacity_) {
      data_.reset();  // before the new one is taken
      capacity_ = bytes == 0 ? 1 : bytes;
      data_ = std::make_unique_for_overwrite<std::byte[]>(capacity_);
    }
    return data_.get();
  }

 private:
  std::size_t capacity_ = 0;
  std::unique_ptr<std::byte[]> data_;
};

}  // namespace horon
