// What a process set has for itself: a transport that nothing else uses.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/transport.h"
#include "named/device_batches.h"

namespace horon {

class ProcessSetLane {
 public:
  virtual ~ProcessSetLane() = default;
  virtual Transport& transport() = 0;
  // Null where operations on devices can not be carried out.
  virtual DeviceBatches* device_batches() { return nullptr; }
  // Says goodbye. Does not wait for anybody.
  virtual void shutdown() = 0;
  virtual void abort(const std::string& reason) = 0;
};

// Makes the lane of process set `id` with these global ranks. Called on all of them; blocks until
// all have come, and calls `look_around` meanwhile, which throws when one of them never will.
using LaneFactory = std::function<std::unique_ptr<ProcessSetLane>(
    int id, const std::vector<int>& ranks, const std::function<void()>& look_around)>;

// Memory for packing tensors into: where the transport need not copy it again, if there is such a
// place.
using BufferFactory = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;

}  // namespace horon
