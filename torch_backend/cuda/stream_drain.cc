#include "cuda/stream_drain.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <algorithm>

#include "cuda/event.h"
#include "cuda/host_wait.h"
#include "cuda/stream.h"
#include "errors.h"

namespace horon::torch_backend {

using c10::cuda::CUDAStream;

std::vector<CUDAStream> current_streams(const std::vector<std::int64_t>& device_ids) {
  // Asking CUDA anything would start its driver, after which the process can not fork.
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  if (allocator == nullptr || !allocator->initialized() ||
      torch::utils::is_device_in_bad_fork(at::kCUDA)) {
    return {};
  }
  std::vector<c10::DeviceIndex> devices{c10::cuda::current_device()};
  for (const std::int64_t device : device_ids) {
    TORCH_CHECK_VALUE(device >= 0 && device < c10::cuda::device_count(),
                      "horon: barrier: device_ids: expected numbers of GPUs from 0 to ",
                      c10::cuda::device_count() - 1, ", got ", device, ".");
    devices.push_back(static_cast<c10::DeviceIndex>(device));
  }
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  std::vector<CUDAStream> streams;
  for (const c10::DeviceIndex device : devices) {
    if (c10::cuda::hasPrimaryContext(device)) {
      streams.push_back(c10::cuda::getCurrentCUDAStream(device));
    }
  }
  return streams;
}

namespace {

bool run_out_by(const Deadline& deadline, const std::vector<CUDAStream>& streams) {
  const RelaxedCaptureScope capture_scope;
  std::vector<Event> reached;
  reached.reserve(streams.size());
  for (const CUDAStream& stream : streams) {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    if (!is_capturing(stream.stream())) {
      reached.emplace_back(stream.device_index()).record(stream.stream());
    }
  }
  const auto have_run = [&] {
    return std::all_of(reached.begin(), reached.end(),
                       [](const Event& event) { return event.is_done(); });
  };
  return ends_within(have_run, deadline);
}

}  // namespace

void drain_streams(const std::vector<CUDAStream>& streams, const Deadline& deadline) {
  if (streams.empty()) {
    return;  // and do not touch CUDA
  }
  bool have_run = false;
  try {
    have_run = run_out_by(deadline, streams);
  } catch (...) {
    rethrow_translated();
  }
  if (!have_run) {
    C10_THROW_ERROR(DistBackendError,
                    "horon: barrier: Timed out waiting " +
                        std::to_string(deadline.timeout().count()) +
                        "ms for what was queued on this rank's GPU before it. The other ranks are "
                        "not met: they wait for this one.");
  }
}

}  // namespace horon::torch_backend
