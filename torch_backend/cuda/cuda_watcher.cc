#include "cuda/cuda_watcher.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "core/fork_guard.h"
#include "core/thread_name.h"
#include "cuda/stream.h"

namespace horon::torch_backend {
namespace {

// Between two looks. A failure is noticed that much later, and healthy work is not: nobody waits
// for this thread.
constexpr std::chrono::milliseconds kBetweenLooks{20};

}  // namespace

CudaWatcher& CudaWatcher::instance() {
  static auto* const watcher = new CudaWatcher();  // its thread may outlive static objects
  return *watcher;
}

void CudaWatcher::watch(std::shared_ptr<Watched> watched, c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  if (is_stopping_) {
    return;
  }
  if (!thread_.joinable()) {
    thread_ = start_thread([this, device] { run(device); });
  }
  added_.push_back(std::move(watched));
  changed_.notify_one();
}

void CudaWatcher::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    thread.swap(thread_);
    changed_.notify_one();
  }
  if (thread.joinable()) {
    thread.join();
  }
}

void CudaWatcher::run(c10::DeviceIndex device) {
  name_this_thread("horon-cuda");
  // A thread begins on GPU 0, where what comes next would start a context of half a gigabyte.
  const c10::cuda::CUDAGuard device_guard(device);
  // What is asked here must not end a capture that some thread of the user's is in.
  const RelaxedCaptureScope capture_scope;
  std::vector<std::shared_ptr<Watched>> watched;
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    std::move(added_.begin(), added_.end(), std::back_inserter(watched));
    added_.clear();
    if (watched.empty()) {
      changed_.wait(lock, [this] { return is_stopping_ || !added_.empty(); });
      continue;
    }
    lock.unlock();
    std::erase_if(watched, [](const std::shared_ptr<Watched>& one) { return !one->look(); });
    lock.lock();
    if (!watched.empty()) {
      changed_.wait_for(lock, kBetweenLooks, [this] { return is_stopping_; });
    }
  }
}

}  // namespace horon::torch_backend
