#include "kept_context.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/SafePyObject.h>

#include <array>
#include <memory>
#include <mutex>

namespace horon::torch_backend {
namespace {

// torch/autograd/graph.py: _engine_run_backward.
constexpr const char* kKey = "context";

struct Kept {
  std::mutex mutex;
  std::array<std::shared_ptr<c10::SafePyObject>, 8> contexts;  // guarded by mutex
  std::size_t latest = 0;                                      // guarded by mutex
};

}  // namespace

void keep_python_context() {
  if (!at::impl::ThreadLocalPythonObjects::contains(kKey)) {
    return;
  }
  std::shared_ptr<c10::SafePyObject> context = at::impl::ThreadLocalPythonObjects::get(kKey);
  // Never destroyed: at the end of the process there is no GIL to take any more.
  static auto* kept = new Kept();
  const std::lock_guard lock(kept->mutex);
  if (kept->contexts[kept->latest] == context) {
    return;
  }
  kept->latest = (kept->latest + 1) % kept->contexts.size();
  // The oldest goes at the end of this function, after the lock: that may take the GIL.
  kept->contexts[kept->latest].swap(context);
}

}  // namespace horon::torch_backend
