// The few functions of CUDA's driver (libcuda.so.1) that torch cannot do without. They are found by
// cudaGetDriverEntryPointByVersion, and by libraries that link libcuda.so.1: that is the name that
// the simulator has for the loader.
#include <cstdint>
#include <cstring>
#include <string_view>

#include "cuda_api.h"
#include "memory.h"
#include "streams.h"

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT CUresult cuInit(unsigned /*flags*/) {
  return is_device(0) ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

HORON_SIMULATOR_EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

HORON_SIMULATOR_EXPORT CUresult cuDeviceGetCount(int* count) {
  for (*count = 0; is_device(*count); ++*count) {
  }
  return CUDA_SUCCESS;
}

HORON_SIMULATOR_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

HORON_SIMULATOR_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                                     CUdevice device) {
  // The runtime's attributes have the driver's numbers.
  return static_cast<CUresult>(
      cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

// The primary context of a device is a number; it always exists.
HORON_SIMULATOR_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags,
                                                           int* is_active) {
  *flags = 0;
  *is_active = 1;
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

HORON_SIMULATOR_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device) + 1);
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

HORON_SIMULATOR_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  return cuDevicePrimaryCtxRetain(context, current_device());
}

HORON_SIMULATOR_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  const auto device = static_cast<int>(reinterpret_cast<std::intptr_t>(context) - 1);
  if (context != nullptr) {
    if (!is_device(device)) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    set_current_device(device);
  }
  return CUDA_SUCCESS;
}

HORON_SIMULATOR_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes,
                                                        CUdeviceptr pointer) {
  const auto found = find_allocation(reinterpret_cast<const void*>(pointer));
  if (!found) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (base != nullptr) {
    *base = reinterpret_cast<CUdeviceptr>(found->begin);
  }
  if (bytes != nullptr) {
    *bytes = found->bytes;
  }
  return CUDA_SUCCESS;
}

HORON_SIMULATOR_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

HORON_SIMULATOR_EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

namespace {

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

struct EntryPoint {
  std::string_view name;
  void* function;
};

void* found_entry_point(std::string_view name) {
  static const EntryPoint known[] = {
      {"cuInit", reinterpret_cast<void*>(cuInit)},
      {"cuDriverGetVersion", reinterpret_cast<void*>(cuDriverGetVersion)},
      {"cuDeviceGet", reinterpret_cast<void*>(cuDeviceGet)},
      {"cuDeviceGetCount", reinterpret_cast<void*>(cuDeviceGetCount)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(cuDeviceGetAttribute)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(cuDevicePrimaryCtxGetState)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(cuDevicePrimaryCtxRetain)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(cuCtxGetCurrent)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(cuCtxSetCurrent)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(cuMemGetAddressRange_v2)},
      {"cuGetErrorString", reinterpret_cast<void*>(cuGetErrorString)},
      {"cuGetErrorName", reinterpret_cast<void*>(cuGetErrorName)},
  };
  for (const EntryPoint& each : known) {
    if (each.name == name) {
      return each.function;
    }
  }
  // torch asks for all of its functions at once, and refuses to work where one is not there.
  return name.starts_with("cuLogs") ? nullptr : reinterpret_cast<void*>(not_supported);
}

}  // namespace

HORON_SIMULATOR_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned /*version*/, unsigned long long /*flags*/,
    cudaDriverEntryPointQueryResult* status) {
  *function = found_entry_point(name);
  if (status != nullptr) {
    *status =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t
cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                        cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, status);
}
