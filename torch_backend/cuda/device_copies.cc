#include "cuda/device_copies.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/pack_kernels.h"

namespace horon::torch_backend {

void copy_on_device(const std::vector<ByteCopy>& copies, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  launch_pack(plan_copies(copies), c10::cuda::getCurrentCUDAStream().stream());
}

}  // namespace horon::torch_backend
