// An operation that was queued on a stream, until the GPU has come past its end.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "cuda/event_pool.h"

namespace horon::torch_backend {

// Thread safety: all methods. Shared between the Work, the group, and the watcher's thread, which
// never touches the tensors.
class CudaOperation {
 public:
  struct Origin {
    const char* name = "";  // "all_reduce"
    std::uint64_t sequence = 0;
    std::uint64_t completion_key = 0;
    Deadline deadline = Deadline::after(std::chrono::milliseconds(0));
  };

  // The caller's stream, and the one that it runs on: the same for synchronous operations.
  struct Streams {
    c10::cuda::CUDAStream caller;
    c10::cuda::CUDAStream own;
  };

  // `end` was recorded on its own stream behind the operation. `kept`: tensors that must live until
  // then.
  CudaOperation(const Origin& origin, const Streams& streams, EventPool::Lease end,
                std::vector<at::Tensor> kept)
      : origin_(origin), streams_(streams), end_(std::move(end)), kept_(std::move(kept)) {}

  const char* name() const { return origin_.name; }
  // "all_reduce #42".
  std::string text() const { return std::string(origin_.name) + " #" + std::to_string(sequence()); }
  std::uint64_t sequence() const { return origin_.sequence; }
  std::uint64_t completion_key() const { return origin_.completion_key; }
  const Deadline& deadline() const { return origin_.deadline; }
  const c10::cuda::CUDAStream& stream() const { return streams_.own; }

  // Whether the GPU has come past it. Throws CudaError when something has failed there.
  bool has_ended() const { return is_over() || end_->is_done(); }
  // What is queued on `stream` from now on waits for it; the host does not.
  void block(const c10::cuda::CUDAStream& stream) {
    if (stream != streams_.own) {
      const c10::cuda::CUDAGuard guard(stream.device_index());
      end_->block(stream.stream(), stream.device_index());
    }
    if (stream == streams_.caller) {
      // Where the tensors come from, and where their memory is used again: behind the operation.
      (void)take_kept();
    }
  }

  // Whether somebody has said finish() or fail().
  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  void finish() { is_over_.store(true, std::memory_order_release); }
  // The first error stays.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!is_over()) {
      error_ = std::move(error);
      finish();
    }
  }
  std::exception_ptr error() const {
    if (!is_over()) {
      return nullptr;
    }
    const std::lock_guard lock(mutex_);
    return error_;
  }

  // The tensors, once: nobody needs them any more, or streams know what to wait for.
  std::vector<at::Tensor> take_kept() {
    const std::lock_guard lock(mutex_);
    return std::exchange(kept_, {});
  }

 private:
  const Origin origin_;
  const Streams streams_;
  const EventPool::Lease end_;
  std::atomic<bool> is_over_{false};
  mutable std::mutex mutex_;
  std::exception_ptr error_;      // guarded by mutex_
  std::vector<at::Tensor> kept_;  // guarded by mutex_
};

}  // namespace horon::torch_backend
