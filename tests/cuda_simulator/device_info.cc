// Which devices there are, and what they can do: figures of an H100, where any are asked for.
#include <cstdio>
#include <cstring>

#include "cuda_api.h"
#include "last_error.h"
#include "settings.h"
#include "streams.h"

namespace horon::simulator {
namespace {

// What is the same under cudaGetDeviceProperties and cudaDeviceGetAttribute.
struct Figure {
  cudaDeviceAttr attribute;
  int value;
};

constexpr Figure kFigures[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
    {cudaDevAttrTotalConstantMemory, 65536},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxPitch, 2147483647},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrTextureAlignment, 512},
    {cudaDevAttrTexturePitchAlignment, 32},
    {cudaDevAttrSurfaceAlignment, 512},
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrL2CacheSize, 52428800},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrHostRegisterSupported, 1},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
};

int value_of(cudaDeviceAttr attribute) {
  for (const Figure& figure : kFigures) {
    if (figure.attribute == attribute) {
      return figure.value;
    }
  }
  return 0;
}

// The number on the machine, whatever CUDA_VISIBLE_DEVICES makes of it.
int pci_bus(int index) { return settings().visible_devices[static_cast<std::size_t>(index)] + 1; }

}  // namespace
}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(settings().visible_devices.size());
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaGetDevice(int* index) {
  if (!is_device(0)) {
    return failed(cudaErrorNoDevice);
  }
  *index = current_device();
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaSetDevice(int index) {
  if (!is_device(index)) {
    return failed(cudaErrorInvalidDevice);
  }
  set_current_device(index);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaInitDevice(int index, unsigned /*device_flags*/,
                                                  unsigned /*flags*/) {
  return is_device(index) ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDeviceSynchronize() {
  if (!is_device(current_device())) {
    return failed(cudaErrorNoDevice);
  }
  device(current_device()).synchronize();
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                                          int index) {
  if (!is_device(index)) {
    return failed(cudaErrorInvalidDevice);
  }
  *value = attribute == cudaDevAttrPciBusId ? pci_bus(index) : value_of(attribute);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  if (!is_device(index)) {
    return failed(cudaErrorInvalidDevice);
  }
  const auto figure = [](cudaDeviceAttr attribute) { return value_of(attribute); };
  const auto bytes = [](cudaDeviceAttr attribute) {
    return static_cast<std::size_t>(value_of(attribute));
  };
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Simulated H100");
  std::memset(properties->uuid.bytes, 0x40 + pci_bus(index), sizeof properties->uuid.bytes);
  properties->totalGlobalMem = settings().memory_bytes;
  properties->sharedMemPerBlock = bytes(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = bytes(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = bytes(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->reservedSharedMemPerBlock = bytes(cudaDevAttrReservedSharedMemoryPerBlock);
  properties->regsPerBlock = figure(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = figure(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->warpSize = figure(cudaDevAttrWarpSize);
  properties->memPitch = bytes(cudaDevAttrMaxPitch);
  properties->maxThreadsPerBlock = figure(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsDim[0] = figure(cudaDevAttrMaxBlockDimX);
  properties->maxThreadsDim[1] = figure(cudaDevAttrMaxBlockDimY);
  properties->maxThreadsDim[2] = figure(cudaDevAttrMaxBlockDimZ);
  properties->maxGridSize[0] = figure(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = figure(cudaDevAttrMaxGridDimY);
  properties->maxGridSize[2] = figure(cudaDevAttrMaxGridDimZ);
  properties->totalConstMem = bytes(cudaDevAttrTotalConstantMemory);
  properties->major = figure(cudaDevAttrComputeCapabilityMajor);
  properties->minor = figure(cudaDevAttrComputeCapabilityMinor);
  properties->textureAlignment = bytes(cudaDevAttrTextureAlignment);
  properties->texturePitchAlignment = bytes(cudaDevAttrTexturePitchAlignment);
  properties->surfaceAlignment = bytes(cudaDevAttrSurfaceAlignment);
  properties->multiProcessorCount = figure(cudaDevAttrMultiProcessorCount);
  properties->maxThreadsPerMultiProcessor = figure(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = figure(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->l2CacheSize = figure(cudaDevAttrL2CacheSize);
  properties->memoryBusWidth = figure(cudaDevAttrGlobalMemoryBusWidth);
  properties->asyncEngineCount = figure(cudaDevAttrAsyncEngineCount);
  properties->concurrentKernels = figure(cudaDevAttrConcurrentKernels);
  properties->unifiedAddressing = figure(cudaDevAttrUnifiedAddressing);
  properties->canMapHostMemory = figure(cudaDevAttrCanMapHostMemory);
  properties->streamPrioritiesSupported = figure(cudaDevAttrStreamPrioritiesSupported);
  properties->hostRegisterSupported = figure(cudaDevAttrHostRegisterSupported);
  properties->canUseHostPointerForRegisteredMem =
      figure(cudaDevAttrCanUseHostPointerForRegisteredMem);
  properties->pciBusID = pci_bus(index);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int index) {
  if (!is_device(index) || length < 13) {
    return failed(cudaErrorInvalidValue);
  }
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0",
                static_cast<unsigned>(pci_bus(index)) & 0xffU);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int index, int peer) {
  if (!is_device(index) || !is_device(peer)) {
    return failed(cudaErrorInvalidDevice);
  }
  *can = index != peer ? 1 : 0;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned /*flags*/) {
  return is_device(peer) ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// Nothing is there to be profiled.
HORON_SIMULATOR_EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
HORON_SIMULATOR_EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }
