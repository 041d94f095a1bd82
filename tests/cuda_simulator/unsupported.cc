// Everything else of CUDA's runtime, its driver and NCCL that torch may call: an error, so that no
// call reaches the real libraries. Declared without parameters, and so never beside CUDA's headers.
#include <cstdio>
#include <cstdlib>

namespace {

// One line on standard error where HORON_SIMULATOR_VERBOSE is set.
int not_supported(const char* function, int error) {
  static const bool is_verbose = std::getenv("HORON_SIMULATOR_VERBOSE") != nullptr;
  if (is_verbose) {
    std::fprintf(stderr, "CUDA simulator: %s is not supported\n", function);
  }
  return error;
}

constexpr int kCudaErrorNotSupported = 801;  // the driver's CUDA_ERROR_NOT_SUPPORTED, too
constexpr int kNcclInvalidUsage = 5;

}  // namespace

#define HORON_UNSUPPORTED(function, error)                           \
  extern "C" __attribute__((visibility("default"))) int function() { \
    return not_supported(#function, error);                          \
  }
#define HORON_UNSUPPORTED_CUDA(function) HORON_UNSUPPORTED(function, kCudaErrorNotSupported)
#define HORON_UNSUPPORTED_NCCL(function) HORON_UNSUPPORTED(function, kNcclInvalidUsage)
#include "unsupported.inc"
