#include "cuda/device_guard.h"

#include "cuda/cuda_error.h"

namespace horon {

DeviceGuard::DeviceGuard(int device) {
  HORON_CUDA_CHECK(cudaGetDevice(&former_));
  if (former_ != device) {
    HORON_CUDA_CHECK(cudaSetDevice(device), "asked for device ", device);
    has_changed_ = true;
  }
}

DeviceGuard::~DeviceGuard() {
  if (has_changed_) {
    warn_on_cuda_error(cudaSetDevice(former_), "cudaSetDevice");
  }
}

}  // namespace horon
