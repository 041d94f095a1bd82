// Streams and the devices they belong to.
//
// Note [Legacy default stream]
// Work on the legacy default stream of a device waits for all that was put on its blocking streams
// before, and work on a blocking stream for all that was put on the legacy stream before. Both are
// places in queues that the entry waits for; they are taken under the device's lock, so that all
// entries of a device have one order. Streams made with cudaStreamNonBlocking have no part in this.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "cuda_api.h"
#include "stream_queue.h"

// The type that cudaStream_t points to.
struct CUstream_st {
  int device;
  unsigned flags;
  int priority;
  unsigned long long id;
  std::shared_ptr<horon::simulator::StreamQueue> queue =
      std::make_shared<horon::simulator::StreamQueue>();
};

namespace horon::simulator {

using Stream = CUstream_st;

// One simulated device. Thread safety: every function may be called from any thread.
class Device {
 public:
  explicit Device(int index);

  Stream* create_stream(unsigned flags, int priority);
  // What was submitted still runs.
  void destroy_stream(Stream* stream);
  Stream* legacy_stream() { return legacy_; }

  // Puts work on a stream of this device.
  Mark submit(Stream* stream, std::function<void()> work);
  // Blocks until all that was submitted is done.
  void synchronize();

 private:
  bool is_ordered_with_legacy(const Stream* stream) const;
  std::vector<Mark> predecessors(const Stream* stream);

  const int index_;
  Stream* const legacy_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::set<Stream*> streams_;                         // without the legacy stream
  std::vector<std::shared_ptr<StreamQueue>> closed_;  // whose threads are still to be joined
};

Device& device(int index);
bool is_device(int index);
// Of this thread.
int current_device();
void set_current_device(int index);

// The stream behind a handle: of the current device for the default streams; null for no stream's.
Stream* find_stream(cudaStream_t handle);

inline Mark submit(Stream* stream, std::function<void()> work) {
  return device(stream->device).submit(stream, std::move(work));
}

}  // namespace horon::simulator
