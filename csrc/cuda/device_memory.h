// Memory of a GPU with an owner.
#pragma once

#include <cstddef>

#include "cuda/owned_handle.h"

namespace horon {

struct DeviceMemoryTraits {
  using Handle = std::byte*;
  static void release(std::byte* memory, int device) noexcept;
};

// Freeing waits for the whole device: keep it for as long as the group lives.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Blocks the host. Throws CudaError. 0 bytes: data() is null.
  DeviceMemory(int device, std::size_t bytes);

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  int device() const { return memory_.device(); }

 private:
  OwnedHandle<DeviceMemoryTraits> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace horon
