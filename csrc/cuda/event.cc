#include "cuda/event.h"

#include "cuda/cuda_error.h"
#include "cuda/device_guard.h"

namespace horon {

void EventTraits::release(EventHandle event, int /*device*/) noexcept {
  warn_on_cuda_error(cudaEventDestroy(event), "cudaEventDestroy");
}

Event::Event(int device) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  HORON_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  event_ = OwnedHandle<EventTraits>(event, device);
}

void Event::record(StreamHandle stream) const {
  const DeviceGuard guard(device());  // event and stream must be of the current device
  HORON_CUDA_CHECK(cudaEventRecord(get(), stream));
}

void Event::block(StreamHandle stream, int stream_device) const {
  const DeviceGuard guard(stream_device);
  HORON_CUDA_CHECK(cudaStreamWaitEvent(stream, get(), 0));
}

bool Event::is_done() const {
  const cudaError_t code = cudaEventQuery(get());
  if (code == cudaErrorNotReady) {
    (void)cudaGetLastError();  // it is no error, but stays in the runtime as one
    return false;
  }
  HORON_CUDA_CHECK(code, "cudaEventQuery: work before the event has failed");
  return true;
}

}  // namespace horon
