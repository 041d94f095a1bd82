// Carries out agreed batches of tensors that lie on a device.
//
// Note [Batches on a device]
// The device has queues of its own. run() queues a batch and returns, so an operation counts as
// done, for the engine, when it is queued in the same order on all ranks; whoever takes its result
// makes the device wait, not the host. What happens after that is seen by the engine's attendant,
// which looks around every 50 ms while something is under way: a device that fails or does not come
// in time, a rank that died meanwhile. Then everything is aborted, on the device as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/wait_context.h"
#include "named/batch_tensor.h"

namespace horon {

struct DeviceBatch {
  const std::vector<BatchTensor>& tensors;  // of plan_fusion, all of DeviceKind::kCuda
  int root = 0;                             // its place in the set
  // allgather: [rank][tensor] rows; alltoall: [source][destination] rows.
  std::vector<std::int64_t> numbers;
};

struct DeviceFailure {
  std::string text;  // empty: nothing failed
  // A connection broke, say; no mere timeout. See Note [Whose connection it was].
  bool may_be_a_death = false;
};

// Two exist: torch_backend's, and the tests' fake.
// Thread safety: one thread at a time, as the executor; abort() from any.
class DeviceBatches {
 public:
  virtual ~DeviceBatches() = default;

  // Why this process can not take part at all (it has no such device); empty if it can.
  virtual std::string refusal() = 0;

  // Queues the batch. All ranks of the set call it, in the same order; the first call may wait for
  // all of them. It does not wait for the device.
  // Throws GroupError and its kinds, or whatever keeps this rank from its part: the set is over.
  virtual void run(const DeviceBatch& batch, const WaitContext& context) = 0;

  // What went wrong on the device since. Does not block.
  virtual DeviceFailure check() = 0;
  // How many batches that were queued had not come when check() looked last.
  virtual std::size_t n_under_way() const = 0;

  // Gives what was queued a few seconds to come, then ends. False when something had not come: it
  // was ended on the device, here, and other ranks' devices may wait for it.
  virtual bool shutdown() = 0;
  // Ends what is under way, on the device as well; later batches fail.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace horon
