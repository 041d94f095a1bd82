#include "streams.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "last_error.h"
#include "settings.h"

namespace horon::simulator {
namespace {

thread_local int current = 0;

// All handles that are alive. Never freed: streams are used until the process is gone.
struct LiveStreams {
  std::mutex mutex;
  std::set<const Stream*> streams;

  static LiveStreams& get() {
    static auto* const live = new LiveStreams;
    return *live;
  }
};

Stream* make_stream(int device, unsigned flags, int priority) {
  static std::atomic<unsigned long long> next_id{1};
  auto* stream = new Stream{device, flags, priority,
                            next_id.fetch_add(1, std::memory_order_relaxed)};  // only a number
  LiveStreams& live = LiveStreams::get();
  const std::lock_guard lock(live.mutex);
  live.streams.insert(stream);
  return stream;
}

// cudaStreamPerThread: one blocking stream for each device.
struct ThreadStreams {
  std::map<int, Stream*> of_device;

  ~ThreadStreams() {
    for (const auto& [index, stream] : of_device) {
      device(index).destroy_stream(stream);
    }
  }
};

thread_local ThreadStreams thread_streams;

}  // namespace

Device::Device(int index)
    : index_(index), legacy_(make_stream(index, cudaStreamDefault, /*priority=*/0)) {}

Stream* Device::create_stream(unsigned flags, int priority) {
  Stream* stream = make_stream(index_, flags, priority);
  const std::lock_guard lock(mutex_);
  streams_.insert(stream);
  return stream;
}

void Device::destroy_stream(Stream* stream) {
  {
    LiveStreams& live = LiveStreams::get();
    const std::lock_guard lock(live.mutex);
    live.streams.erase(stream);
  }
  const std::lock_guard lock(mutex_);
  streams_.erase(stream);
  stream->queue->close();
  closed_.push_back(stream->queue);
  delete stream;
  std::erase_if(closed_, [](const auto& queue) { return queue->try_join(); });
}

bool Device::is_ordered_with_legacy(const Stream* stream) const {
  return stream != legacy_ && (stream->flags & cudaStreamNonBlocking) == 0;
}

// Requires mutex_.
std::vector<Mark> Device::predecessors(const Stream* stream) {
  std::vector<Mark> marks;
  const auto add = [&marks](const Stream* other) {
    const Mark mark{other->queue, other->queue->last()};
    if (!mark.is_done()) {
      marks.push_back(mark);
    }
  };
  if (stream == legacy_) {
    for (const Stream* other : streams_) {
      if (is_ordered_with_legacy(other)) {
        add(other);
      }
    }
  } else if (is_ordered_with_legacy(stream)) {
    add(legacy_);
  }
  return marks;
}

Mark Device::submit(Stream* stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  std::vector<Mark> before = predecessors(stream);
  if (!before.empty()) {
    work = [before = std::move(before), work = std::move(work)] {
      for (const Mark& mark : before) {
        mark.wait();
      }
      work();
    };
  }
  return {stream->queue, stream->queue->submit(std::move(work))};
}

void Device::synchronize() {
  std::vector<Mark> marks;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& queue : closed_) {
      marks.push_back({queue, queue->last()});
    }
    for (const Stream* stream : streams_) {
      marks.push_back({stream->queue, stream->queue->last()});
    }
    marks.push_back({legacy_->queue, legacy_->queue->last()});
  }
  for (const Mark& mark : marks) {
    mark.wait();
  }
}

Device& device(int index) {
  static auto* const devices = [] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (std::size_t i = 0; i < settings().visible_devices.size(); ++i) {
      made->push_back(std::make_unique<Device>(static_cast<int>(i)));
    }
    return made;
  }();
  return *devices->at(static_cast<std::size_t>(index));
}

bool is_device(int index) {
  return index >= 0 && static_cast<std::size_t>(index) < settings().visible_devices.size();
}

int current_device() { return current; }
void set_current_device(int index) { current = index; }

Stream* find_stream(cudaStream_t handle) {
  if (!is_device(current)) {
    return nullptr;
  }
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return device(current).legacy_stream();
  }
  if (handle == cudaStreamPerThread) {
    Stream*& stream = thread_streams.of_device[current];
    if (stream == nullptr) {
      stream = device(current).create_stream(cudaStreamDefault, /*priority=*/0);
    }
    return stream;
  }
  LiveStreams& live = LiveStreams::get();
  const std::lock_guard lock(live.mutex);
  return live.streams.contains(handle) ? handle : nullptr;
}

}  // namespace horon::simulator

// ---- The runtime's functions for streams ----

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream,
                                                                unsigned flags, int priority) {
  if (!is_device(current_device())) {
    return failed(cudaErrorNoDevice);
  }
  *stream = device(current_device()).create_stream(flags, std::clamp(priority, -5, 0));
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr || stream != handle) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  device(stream->device).destroy_stream(stream);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *priority = stream->priority;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *flags = stream->flags;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *id = stream->id;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* index) {
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *index = stream->device;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  return stream->queue->is_done(stream->queue->last()) ? cudaSuccess : failed(cudaErrorNotReady);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const Mark mark{stream->queue, stream->queue->last()};
  mark.wait();
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                                                      void* data) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  submit(stream, [function, data] { function(data); });
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle,
                                                         cudaStreamCallback_t callback, void* data,
                                                         unsigned /*flags*/) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  submit(stream, [handle, callback, data] { callback(handle, cudaSuccess, data); });
  return cudaSuccess;
}

// Nothing is ever captured: cudaStreamBeginCapture is not supported.
HORON_SIMULATOR_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                                         cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return find_stream(handle) == nullptr ? failed(cudaErrorInvalidResourceHandle) : cudaSuccess;
}

// Everything else that it can tell is defined only while the stream is capturing.
HORON_SIMULATOR_EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* /*id*/,
    cudaGraph_t* /*graph*/, const cudaGraphNode_t** /*dependencies*/,
    const cudaGraphEdgeData** /*edge_data*/, std::size_t* /*n_dependencies*/) {
  return cudaStreamIsCapturing(handle, status);
}

HORON_SIMULATOR_EXPORT cudaError_t
cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode ours = cudaStreamCaptureModeGlobal;
  std::swap(*mode, ours);
  return cudaSuccess;
}
