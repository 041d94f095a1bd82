// A CUDA stream with an owner.
#pragma once

#include <cstdint>

#include "cuda/handles.h"
#include "cuda/owned_handle.h"

namespace horon {

enum class StreamPriority : std::uint8_t {
  kNormal,
  kHigh,  // the device's greatest: its kernels are resident before those of other streams
};

struct StreamTraits {
  using Handle = StreamHandle;
  static void release(StreamHandle stream, int device) noexcept;
};

// Thread safety: CUDA's own; a stream may be used by several threads. Its destruction does not wait
// for what is queued: CUDA finishes that.
class Stream {
 public:
  // Does not synchronise with the legacy default stream. Throws CudaError.
  Stream(int device, StreamPriority priority);

  StreamHandle get() const { return stream_.get(); }
  int device() const { return stream_.device(); }

 private:
  OwnedHandle<StreamTraits> stream_;
};

// Whether operations on the stream are being recorded into a graph. Throws CudaError.
bool is_capturing(StreamHandle stream);

// While it lives, what this thread asks about work outside of a capture spoils no capture, neither
// another thread's nor its own. For whoever polls or allocates while somebody captures.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope();
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  int former_mode_;
};

}  // namespace horon
