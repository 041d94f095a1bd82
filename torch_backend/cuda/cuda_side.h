// What named operations on CUDA tensors share within an engine, and what each of them has.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/event_pool.h"
#include "named_operation_builder.h"

namespace horon::torch_backend {

// Several hold one: the operations of a batch, and who watches over it.
using SharedEvent = std::shared_ptr<const EventPool::Lease>;

// An event on a stream. Of two on one stream the one with the larger number comes later, so that
// who waits for it waits for both.
struct ReadyMark {
  EventPool::Lease event;
  c10::cuda::CUDAStream stream;
  std::uint64_t number;
};

// Thread safety: all methods.
class CudaState {
 public:
  ReadyMark mark(const c10::cuda::CUDAStream& stream);

  // The GPU of this process in a set: the first one asked for.
  c10::DeviceIndex device_of(int set, c10::DeviceIndex first);
  // Where it has none: the one that was used last in any set, else the one set by default.
  c10::DeviceIndex device_of(int set);
  void set_default_device(c10::DeviceIndex device);

  // Where batches run, if not on a stream of their set's own.
  void run_on(const c10::cuda::CUDAStream& stream);
  std::optional<c10::cuda::CUDAStream> stream();

  // Keeps tensors until the event has come; null: until the next sweep.
  void keep(TensorList tensors, SharedEvent until);
  // Lets go of what need not be kept any more.
  void sweep();

 private:
  struct Kept {
    TensorList tensors;
    SharedEvent until;
  };

  std::mutex mutex_;
  // Guarded by mutex_:
  std::map<c10::DeviceIndex, EventPool> pools_;
  std::uint64_t n_marks_ = 0;
  std::map<int, c10::DeviceIndex> devices_;  // by set
  std::optional<c10::DeviceIndex> last_device_;
  c10::DeviceIndex default_device_ = 0;
  std::optional<c10::cuda::CUDAStream> stream_;
  std::deque<Kept> kept_;
};

struct CudaSide {
  // Constant once it is made:
  std::shared_ptr<CudaState> state;  // outlives the engine with the operation
  ReadyMark ready;                   // on the stream that it was submitted on
  std::vector<c10::Device> devices;  // of the caller's inputs
  // Set by the engine's attendant before the operation is done; null if it was never queued.
  SharedEvent done;
  bool is_let_go = false;  // the taker's
};

}  // namespace horon::torch_backend
