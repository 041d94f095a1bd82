// Every call into CUDA's runtime goes through HORON_CUDA_CHECK; in destructors through
// warn_on_cuda_error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"

namespace horon {

// CUDA refused a call, or an earlier kernel failed. `code` is a cudaError_t.
class CudaError : public Error {
 public:
  CudaError(const std::string& message, cudaError_t code) : Error(message), code_(code) {}
  cudaError_t code() const { return code_; }

 private:
  const cudaError_t code_;
};

// "cudaMalloc(...) on device 0: out of memory (cudaErrorMemoryAllocation); <context>".
[[noreturn]] void throw_cuda_error(cudaError_t code, const char* call, const std::string& context);

// Logs, for places that must not throw. Silent while the process ends: CUDA is unloaded by then,
// and has freed everything itself.
void warn_on_cuda_error(cudaError_t code, const char* call) noexcept;

}  // namespace horon

// Throws horon::CudaError unless `call` succeeds. More arguments say what it was for, and what to
// do.
#define HORON_CUDA_CHECK(call, ...)                                              \
  do {                                                                           \
    const cudaError_t horon_cuda_code = (call);                                  \
    if (horon_cuda_code != cudaSuccess) {                                        \
      ::horon::throw_cuda_error(horon_cuda_code, #call,                          \
                                ::horon::concat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                            \
  } while (false)
