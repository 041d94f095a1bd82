// Events: a place in a stream's queue, taken when the event is recorded.
#include <chrono>
#include <memory>
#include <mutex>

#include "cuda_api.h"
#include "last_error.h"
#include "streams.h"

namespace {

using horon::simulator::Mark;
using Clock = std::chrono::steady_clock;

// What one cudaEventRecord made. Waiters keep it when the event is recorded anew or destroyed.
struct Record {
  std::shared_ptr<Clock::time_point> time;  // written by the queue's entry
  Mark mark;
};

}  // namespace

// The type that cudaEvent_t points to.
struct CUevent_st {
  const int device;
  const unsigned flags;
  std::mutex mutex;
  Record record;  // guarded by mutex; without a queue until the first record, and then done

  Record snapshot() {
    const std::lock_guard lock(mutex);
    return record;
  }
};

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (!is_device(current_device())) {
    return failed(cudaErrorNoDevice);
  }
  if ((flags & cudaEventInterprocess) != 0) {
    return failed(cudaErrorNotSupported);
  }
  *event = new CUevent_st{current_device(), flags, {}, {}};
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  delete event;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle,
                                                            unsigned /*flags*/) {
  Stream* stream = find_stream(handle);
  // An event is recorded only on streams of its device.
  if (event == nullptr || stream == nullptr || stream->device != event->device) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  Record record{std::make_shared<Clock::time_point>(), {}};
  record.mark = submit(stream, [time = record.time] { *time = Clock::now(); });
  const std::lock_guard lock(event->mutex);
  event->record = std::move(record);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  return event->snapshot().mark.is_done() ? cudaSuccess : failed(cudaErrorNotReady);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  event->snapshot().mark.wait();
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event,
                                                       unsigned /*flags*/) {
  Stream* stream = find_stream(handle);
  if (event == nullptr || stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const Mark mark = event->snapshot().mark;
  if (mark.queue != nullptr && mark.queue != stream->queue) {
    submit(stream, [mark] { mark.wait(); });
  }
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start,
                                                        cudaEvent_t end) {
  if (start == nullptr || end == nullptr ||
      ((start->flags | end->flags) & cudaEventDisableTiming)) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const Record first = start->snapshot();
  const Record second = end->snapshot();
  if (first.time == nullptr || second.time == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (!first.mark.is_done() || !second.mark.is_done()) {
    return failed(cudaErrorNotReady);
  }
  *ms = std::chrono::duration<float, std::milli>(*second.time - *first.time).count();
  return cudaSuccess;
}
