#include "last_error.h"

#include <utility>

namespace horon::simulator {
namespace {

thread_local cudaError_t last = cudaSuccess;

struct Described {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr Described kDescribed[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported",
     "operation not supported by the CUDA simulator"},
};

const Described* describe(cudaError_t error) {
  for (const Described& each : kDescribed) {
    if (each.error == error) {
      return &each;
    }
  }
  return nullptr;
}

}  // namespace

cudaError_t failed(cudaError_t error) { return last = error; }

}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
HORON_SIMULATOR_EXPORT cudaError_t cudaPeekAtLastError() { return last; }

HORON_SIMULATOR_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  const Described* found = describe(error);
  return found == nullptr ? "cudaErrorUnknown" : found->name;
}

HORON_SIMULATOR_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  const Described* found = describe(error);
  return found == nullptr ? "an error that the CUDA simulator has no words for" : found->text;
}
