#include "cuda/cuda_lane.h"

#include <c10/cuda/CUDAGuard.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <string_view>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "cuda/pack_kernels.h"
#include "nccl/unique_id_exchange.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

using c10::cuda::CUDAStream;

// See decision 0017: a call on a non-blocking communicator costs NCCL a thread. All ranks have met
// before NCCL is asked to connect them, so blocking ones do not wait for a rank that never comes.
bool wants_blocking() {
  const char* value = std::getenv("HORON_NCCL_BLOCKING");
  const std::string_view text = value == nullptr ? "" : value;
  if (!text.empty() && text != "0" && text != "1") {
    throw UsageError(concat("HORON_NCCL_BLOCKING: expected 0 or 1, got '", text, "'."));
  }
  return text != "0";
}

// NCCL takes some milliseconds where no graph is left.
constexpr std::chrono::milliseconds kGraphPatience{1000};

void launch_copies(const std::vector<ByteCopy>& copies, StreamHandle stream) {
  launch_pack(plan_copies(copies), stream);
}

}  // namespace

NcclApi& nccl_api() {
  static NcclApi* const api =
      make_nccl_api().release();  // communicators may outlive static objects
  return *api;
}

CudaLane::CudaLane(std::unique_ptr<Communicator> communicator, const CUDAStream& stream)
    : stream_(stream),
      events_(stream.device_index()),
      transport_(nccl_api(), std::move(communicator), launch_copies) {}

std::unique_ptr<CudaLane> CudaLane::connect(const c10::intrusive_ptr<c10d::Store>& store,
                                            const std::string& name, int rank, int n_ranks,
                                            c10::DeviceIndex device, const Deadline& deadline,
                                            std::optional<CUDAStream> stream,
                                            std::function<void()> check) {
  const c10::cuda::CUDAGuard guard(device);
  NcclConfig config;
  config.is_blocking = wants_blocking();
  config.name = name;
  load_pack_kernels();
  StoreAdapter adapter(store, std::move(check));
  const NcclUniqueId id = exchange_unique_id(adapter, nccl_api(), rank, n_ranks, name, deadline);
  auto communicator = Communicator::connect(nccl_api(), id, rank, n_ranks, config, deadline);
  return std::unique_ptr<CudaLane>(new CudaLane(
      std::move(communicator),
      stream ? *stream : c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device)));
}

void CudaLane::end(const std::shared_ptr<CudaLane>& lane, std::function<void(CudaLane&)> end) {
  if (!lane->is_in_graphs_.load(std::memory_order_relaxed)) {
    end(*lane);
    return;
  }
  std::packaged_task<void()> task([lane, end = std::move(end)] { end(*lane); });
  std::future<void> ended = task.get_future();
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error& error) {
    log_warning(concat("rank ", lane->rank(), ": no thread could be had (", error.what(),
                       "), so a communicator that CUDA graphs use is not freed."));
    (void)new std::shared_ptr<CudaLane>(lane);  // freeing it would wait for the graphs
    return;
  }
  if (ended.wait_for(kGraphPatience) == std::future_status::ready) {
    ended.get();
    return;
  }
  log_warning(concat("rank ", lane->rank(), ": a CUDA graph that has captured operations of a ",
                     "process group still lives; the group's communicator on device ",
                     static_cast<int>(lane->device()), " is freed after it. Delete the graphs ",
                     "before the group."));
}

}  // namespace horon::torch_backend
