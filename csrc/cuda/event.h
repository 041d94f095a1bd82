// A CUDA event with an owner: a point in a stream that other streams and the host can wait for.
#pragma once

#include "cuda/handles.h"
#include "cuda/owned_handle.h"

namespace horon {

struct EventTraits {
  using Handle = EventHandle;
  static void release(EventHandle event, int device) noexcept;
};

// Without timing, which makes recording and waiting cheaper.
// Thread safety: CUDA's own.
class Event {
 public:
  // Throws CudaError, like everything here.
  explicit Event(int device);

  // Marks what is queued on the stream now.
  void record(StreamHandle stream) const;
  // Makes the stream wait for what was recorded. Does not block the host. The stream's device has
  // to be told, which may be another one than the event's: a default stream's handle does not say
  // it.
  void block(StreamHandle stream, int stream_device) const;
  // Whether all that was recorded is done. Does not block. Not allowed on a capturing thread.
  bool is_done() const;

  EventHandle get() const { return event_.get(); }
  int device() const { return event_.device(); }

 private:
  OwnedHandle<EventTraits> event_;
};

}  // namespace horon
