#include "cuda/cuda_error.h"

#include "core/log.h"

namespace horon {
namespace {

std::string describe(cudaError_t code, const char* call) {
  int device = -1;
  // A second failure says nothing new.
  const bool has_device = cudaGetDevice(&device) == cudaSuccess;
  return concat(call, has_device ? concat(" on device ", device) : std::string(), ": ",
                cudaGetErrorString(code), " (", cudaGetErrorName(code), ")");
}

}  // namespace

void throw_cuda_error(cudaError_t code, const char* call, const std::string& context) {
  const std::string what = describe(code, call);
  // Launch errors stay in the runtime until they are read; the next caller did nothing wrong.
  (void)cudaGetLastError();
  throw CudaError(context.empty() ? what : concat(what, "; ", context), code);
}

void warn_on_cuda_error(cudaError_t code, const char* call) noexcept {
  if (code == cudaSuccess || code == cudaErrorCudartUnloading) {
    return;
  }
  try {
    (void)cudaGetLastError();
    log_warning(describe(code, call));
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a message
  }
}

}  // namespace horon
