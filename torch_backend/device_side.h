// The part of a process group that carries tensors of GPUs. Only builds with the GPU parts have one
// (cuda/cuda_group.h); nothing outside cuda/ needs a CUDA header.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective.h"
#include "compat.h"
#include "core/deadline.h"
#include "gloo_meeting.h"
#include "hooks.h"

namespace horon::torch_backend {

class Group;

// What an operation brings besides its tensors.
struct DeviceCall {
  c10d::OpType op_type = c10d::OpType::UNKNOWN;
  const char* title = "horon:";  // "horon:all_reduce"; outlives everything
  std::chrono::milliseconds timeout{0};
  bool is_async = true;
  std::uint64_t sequence = 0;

  // "all_reduce".
  const char* name() const { return title + sizeof("horon:") - 1; }
};

// Thread safety: all methods. None may be called with the GIL held.
class DeviceSide {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  virtual ~DeviceSide() = default;

  // Queues it. Null where nobody wants to hear of a synchronous operation's end, and while calls
  // are coalesced.
  virtual WorkPtr issue(Collective collective, const DeviceCall& call) = 0;
  virtual WorkPtr send(const at::Tensor& tensor, int peer, const DeviceCall& call) = 0;
  virtual WorkPtr recv(const at::Tensor& tensor, int peer, const DeviceCall& call) = 0;

  virtual void start_coalescing() = 0;
  // Queues what was collected; null if that is nothing.
  virtual WorkPtr end_coalescing(const DeviceCall& call) = 0;

  // Meets the other ranks before the first operation.
  virtual void connect(c10::Device device, std::chrono::milliseconds timeout) = 0;
  // Blocks until what was queued here, and on the current streams of the GPUs used here, has run.
  virtual void drain(const Deadline& deadline) = 0;

  // Waits for what is under way until then, and frees communicators. Idempotent.
  virtual void shutdown(const Deadline& drain_until) = 0;
  // Fails what is under way. Idempotent.
  virtual void abort(const std::string& reason) = 0;
};

// Whether this build can carry tensors of GPUs.
bool has_gpu_parts();
// Whether this process sees a GPU. Initializes nothing.
bool has_gpus();
// What to say of a CUDA tensor where it can not.
std::string how_to_get_gpu_parts();

struct DeviceSideParts {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int n_ranks = 1;
  std::chrono::milliseconds timeout{0};
  // Separate all-reduces of at most so many bytes travel together; 0: none does.
  std::size_t batch_bytes = 0;
  GlooMaker make_gloo;
  std::weak_ptr<Group> group;
  std::shared_ptr<Hooks> hooks;
};

// Throws where has_gpu_parts() is false.
std::shared_ptr<DeviceSide> make_device_side(DeviceSideParts parts);
// Blocks until the current streams of the current GPU and of these, where they are used, have run
// what they hold. Without the GPU parts nothing can be queued by horon, and nothing is waited for.
void drain_current_streams(const std::vector<std::int64_t>& device_ids, const Deadline& deadline);
// For the end of the process, when all groups are shut down.
void stop_watching_devices();

}  // namespace horon::torch_backend
