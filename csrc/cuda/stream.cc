#include "cuda/stream.h"

#include "cuda/cuda_error.h"
#include "cuda/device_guard.h"

namespace horon {

void StreamTraits::release(StreamHandle stream, int /*device*/) noexcept {
  warn_on_cuda_error(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

Stream::Stream(int device, StreamPriority priority) {
  const DeviceGuard guard(device);
  int least = 0;
  int greatest = 0;
  HORON_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  HORON_CUDA_CHECK(cudaStreamCreateWithPriority(
      &stream, cudaStreamNonBlocking, priority == StreamPriority::kHigh ? greatest : least));
  stream_ = OwnedHandle<StreamTraits>(stream, device);
}

bool is_capturing(StreamHandle stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  HORON_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

RelaxedCaptureScope::RelaxedCaptureScope() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  HORON_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  former_mode_ = static_cast<int>(mode);
}

RelaxedCaptureScope::~RelaxedCaptureScope() {
  auto mode = static_cast<cudaStreamCaptureMode>(former_mode_);
  warn_on_cuda_error(cudaThreadExchangeStreamCaptureMode(&mode),
                     "cudaThreadExchangeStreamCaptureMode");
}

}  // namespace horon
