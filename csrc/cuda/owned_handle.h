// A move-only owner of something that CUDA made, released by Traits::release on its device.
#pragma once

#include <cstdint>
#include <utility>

#include "core/fork_guard.h"

namespace horon {

// Traits has `using Handle` and `static void release(Handle, int device) noexcept`.
// In a forked child nothing is released: CUDA does not work there, and the parent still uses it.
template <class Traits>
class OwnedHandle {
 public:
  using Handle = typename Traits::Handle;

  OwnedHandle() = default;
  OwnedHandle(Handle handle, int device)
      : handle_(handle), device_(device), generation_(fork_generation()) {}
  ~OwnedHandle() { reset(); }
  OwnedHandle(OwnedHandle&& other) noexcept { swap(other); }
  OwnedHandle& operator=(OwnedHandle&& other) noexcept {
    if (this != &other) {
      reset();
      swap(other);
    }
    return *this;
  }
  OwnedHandle(const OwnedHandle&) = delete;
  OwnedHandle& operator=(const OwnedHandle&) = delete;

  Handle get() const { return handle_; }
  int device() const { return device_; }
  explicit operator bool() const { return handle_ != Handle{}; }

  void reset() {
    const Handle handle = std::exchange(handle_, Handle{});
    if (handle != Handle{} && generation_ == fork_generation()) {
      Traits::release(handle, device_);
    }
  }

 private:
  void swap(OwnedHandle& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(device_, other.device_);
    std::swap(generation_, other.generation_);
  }

  Handle handle_{};
  int device_ = -1;
  std::uint32_t generation_ = 0;
};

}  // namespace horon
