// The thread that watches what GPUs have been given: whether it has ended, failed, or takes too
// long.
//
// CUDA's events can not be waited for with a limit, so what is under way is looked at now and then.
// The thread begins with the first operation, and sleeps while nothing is under way.
#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace horon::torch_backend {

// Something with operations under way on a GPU.
class Watched {
 public:
  virtual ~Watched() = default;

  // Looks after what is under way. False when nothing is any more: then it is forgotten until it
  // is given to watch() again. Called on the watcher's thread with no lock held. Must not let go of
  // tensors: the interpreter may be ending.
  virtual bool look() noexcept = 0;
};

// Thread safety: all methods.
class CudaWatcher {
 public:
  // The one of this process: a thread for each group would be too many.
  static CudaWatcher& instance();

  // `device`: of what is under way. Ownership: shared until look() says that nothing is any more.
  void watch(std::shared_ptr<Watched> watched, c10::DeviceIndex device);

  // For the end of the process. Joins the thread; later calls of watch() are ignored.
  void stop();

 private:
  CudaWatcher() = default;

  void run(c10::DeviceIndex device);

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::vector<std::shared_ptr<Watched>> added_;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace horon::torch_backend
