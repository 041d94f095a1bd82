#include "cuda/device_memory.h"

#include "cuda/cuda_error.h"
#include "cuda/device_guard.h"

namespace horon {

void DeviceMemoryTraits::release(std::byte* memory, int /*device*/) noexcept {
  warn_on_cuda_error(cudaFree(memory), "cudaFree");
}

DeviceMemory::DeviceMemory(int device, std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  const DeviceGuard guard(device);
  void* memory = nullptr;
  HORON_CUDA_CHECK(cudaMalloc(&memory, bytes), "asked for ", bytes,
                   " bytes of device memory. Use a smaller fusion buffer.");
  memory_ = OwnedHandle<DeviceMemoryTraits>(static_cast<std::byte*>(memory), device);
}

}  // namespace horon
