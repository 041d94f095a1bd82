// What the operations of one group on one device run on: a communicator, a stream, events.
//
// Note [Graphs hold communicators]
// NCCL counts the graphs that have captured calls on a communicator, and neither finalizes nor
// aborts it before the last of them is gone: the call waits, without a limit. So where something
// has been captured, that is done by a thread of its own, which is waited for a little, and which
// may outlive the group.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/deadline.h"
#include "cuda/event_pool.h"
#include "nccl/nccl_transport.h"

namespace horon::torch_backend {

// NCCL itself; one for the process.
NcclApi& nccl_api();

// Thread safety: as NcclTransport; the other methods from any thread.
class CudaLane {
 public:
  // Blocks until all ranks have come. `name` tells the communicators of a store apart. The ranks'
  // devices may have different numbers. Without `stream` it gets one of its own. `check` is called
  // now and then meanwhile; it throws where waiting has no sense any more. Throws
  // TimeoutError, which names the missing ranks, and GroupError.
  static std::unique_ptr<CudaLane> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::string& name, int rank, int n_ranks,
                                           c10::DeviceIndex device, const Deadline& deadline,
                                           std::optional<c10::cuda::CUDAStream> stream = {},
                                           std::function<void()> check = {});

  NcclTransport& transport() { return transport_; }
  int rank() const { return transport_.rank(); }
  int n_ranks() const { return transport_.n_ranks(); }
  // For asynchronous operations. Of high priority, from torch's pool, unless it was given.
  const c10::cuda::CUDAStream& stream() const { return stream_; }
  EventPool& events() { return events_; }
  c10::DeviceIndex device() const { return stream_.device_index(); }
  // A graph has captured an operation.
  void note_capture() { is_in_graphs_.store(true, std::memory_order_relaxed); }

  // Calls end(), which finalizes or aborts the communicator. Returns when it has, or when a graph
  // that lives on keeps it from it; throws what end() throws in the former case.
  static void end(const std::shared_ptr<CudaLane>& lane, std::function<void(CudaLane&)> end);

 private:
  CudaLane(std::unique_ptr<Communicator> communicator, const c10::cuda::CUDAStream& stream);

  const c10::cuda::CUDAStream stream_;
  EventPool events_;
  NcclTransport transport_;
  std::atomic<bool> is_in_graphs_{false};
};

}  // namespace horon::torch_backend
