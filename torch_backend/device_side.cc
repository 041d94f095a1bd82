#include "device_side.h"

#include <c10/util/Exception.h>

#ifdef HORON_CUDA
#include <c10/cuda/CUDAFunctions.h>

#include "cuda/cuda_group.h"
#include "cuda/cuda_watcher.h"
#include "cuda/stream_drain.h"
#endif

namespace horon::torch_backend {

std::string how_to_get_gpu_parts() {
  return "this build of horon has no CUDA support. Build it with a CUDA build of torch and nvcc of "
         "the "
         "same CUDA version (HORON_CUDA=1 pip install --no-build-isolation . says what is "
         "missing), or "
         "move the tensor to the CPU.";
}

#ifdef HORON_CUDA

bool has_gpu_parts() { return true; }

bool has_gpus() { return c10::cuda::device_count() > 0; }

std::shared_ptr<DeviceSide> make_device_side(DeviceSideParts parts) {
  return std::make_shared<CudaGroup>(std::move(parts));
}

void drain_current_streams(const std::vector<std::int64_t>& device_ids, const Deadline& deadline) {
  drain_streams(current_streams(device_ids), deadline);
}

void stop_watching_devices() { CudaWatcher::instance().stop(); }

#else

bool has_gpu_parts() { return false; }

bool has_gpus() { return false; }

// By value as in the header, for the variant above.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
std::shared_ptr<DeviceSide> make_device_side(DeviceSideParts /*parts*/) {
  TORCH_CHECK(false, "horon: ", how_to_get_gpu_parts());
}

void drain_current_streams(const std::vector<std::int64_t>& /*device_ids*/,
                           const Deadline& /*deadline*/) {}

void stop_watching_devices() {}

#endif

}  // namespace horon::torch_backend
