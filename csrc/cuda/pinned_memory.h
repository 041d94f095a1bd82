// Page-locked memory of the host with an owner.
#pragma once

#include <cstddef>

#include "cuda/owned_handle.h"

namespace horon {

struct PinnedMemoryTraits {
  using Handle = std::byte*;
  static void release(std::byte* memory, int device) noexcept;
};

// Host memory that the GPU reads and writes by itself, while the host goes on. Freeing it is an
// error while a copy is under way.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  // Blocks the host. Throws CudaError. 0 bytes: data() is null.
  PinnedMemory(int device, std::size_t bytes);

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  OwnedHandle<PinnedMemoryTraits> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace horon
