// Named operations on CUDA tensors: what an engine needs for them besides its own parts.
//
// Note [Streams of a named operation]
// submit: an event on the caller's current stream says when the inputs are ready. The process set's
// stream waits for it, carries the batch out, and an event after it says when the results are
// there. Taking the result makes the taker's current stream wait for that one. The host waits for
// no GPU.
//
// Memory belongs to the stream that it was allocated on, and is reused in the order of that stream.
// So what an operation needs lives until its last event has come, unless it is taken on the stream
// that it was submitted on: what comes later there comes after the event. What has to live longer
// than its operation goes to a list that later calls empty, so that no thread of ours lets go of
// tensors while the interpreter ends. Results that were allocated here belong to the set's stream
// and are reported to the allocator as used by the taker's.
//
// In builds without the GPU parts all of this is named_without_cuda.cc.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "named/device_batches.h"
#include "named_operation_builder.h"

namespace horon::torch_backend {

// Thread safety: all methods. Touches CUDA only when there are CUDA tensors.
class NamedCuda {
 public:
  static std::shared_ptr<NamedCuda> make();
  virtual ~NamedCuda() = default;

  // What carries out the batches of a process set, of which this process is rank `rank`; null
  // without the GPU parts.
  virtual std::unique_ptr<DeviceBatches> make_batches(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int set, int rank, int n_ranks) = 0;

  // For an operation of DeviceKind::kCuda that is about to be submitted, on the caller's thread:
  // marks where its inputs are ready. A process set has one GPU in each process, its first
  // tensor's; tensors of other GPUs are copied there. Throws ValueError while a graph is being
  // captured.
  virtual void begin(TensorOperation& operation) = 0;

  // Where batches run; their sets' own streams otherwise. Before the first operation.
  virtual void run_on(const c10::Stream& stream) = 0;

  // The GPU of a rank that joins, for process sets in which it has used none. One that does not
  // exist stands for another one.
  virtual void set_default_device(int device) = 0;
};

// Of operations that have begun on a GPU:

// Whether the results are there.
bool has_come(const CudaSide& side);
// Makes the current stream wait for the results, before they are looked at.
void await_on_stream(TensorOperation& operation);
// Afterwards, or without it: keeps what the GPU may still use. Throws nothing.
void let_go(TensorOperation& operation, TensorList& results) noexcept;

}  // namespace horon::torch_backend
