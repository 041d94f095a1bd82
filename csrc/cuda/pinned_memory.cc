#include "cuda/pinned_memory.h"

#include "cuda/cuda_error.h"
#include "cuda/device_guard.h"

namespace horon {

void PinnedMemoryTraits::release(std::byte* memory, int /*device*/) noexcept {
  warn_on_cuda_error(cudaFreeHost(memory), "cudaFreeHost");
}

PinnedMemory::PinnedMemory(int device, std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  const DeviceGuard guard(device);
  void* memory = nullptr;
  HORON_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "asked for ", bytes,
                   " bytes of page-locked memory. Use a smaller fusion buffer.");
  memory_ = OwnedHandle<PinnedMemoryTraits>(static_cast<std::byte*>(memory), device);
}

}  // namespace horon
