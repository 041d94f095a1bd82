// What programs compiled by nvcc call: registration of kernels and variables, and launches.
#include "kernels.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "last_error.h"
#include "settings.h"
#include "streams.h"

namespace horon::simulator {
namespace {

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

// A kernel that nvcc registered.
struct Registered {
  const char* mangled;
  std::optional<HostKernel> on_host;  // sought at the first launch
};

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, Registered> of_stub;  // guarded by mutex

  static Kernels& get() {
    static auto* const all = new Kernels;  // never freed: libraries register until the end
    return *all;
  }
};

HostKernel find_on_host(const char* mangled) {
  const std::string name = demangled(mangled);
  for (const auto find : {find_pack_kernel, find_torch_kernel}) {
    if (HostKernel found = find(name)) {
      return found;
    }
  }
  if (!settings().ignores_kernels) {
    end_for_unknown(name);
  }
  return [](const Launch&) { return [] {}; };
}

cudaError_t launch(const void* stub, const Launch& how, cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  // A kernel runs on the current device.
  if (stream == nullptr || stream->device != current_device()) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  HostKernel kernel;
  {
    Kernels& kernels = Kernels::get();
    const std::lock_guard lock(kernels.mutex);
    const auto found = kernels.of_stub.find(stub);
    if (found == kernels.of_stub.end()) {
      return failed(cudaErrorInvalidDeviceFunction);
    }
    Registered& registered = found->second;
    if (!registered.on_host) {
      registered.on_host = find_on_host(registered.mangled);
    }
    kernel = *registered.on_host;
  }
  const auto is_empty = [](const dim3& size) { return size.x == 0 || size.y == 0 || size.z == 0; };
  if (is_empty(how.grid) || is_empty(how.block) ||
      std::size_t{how.block.x} * how.block.y * how.block.z > 1024) {
    return failed(cudaErrorInvalidConfiguration);
  }
  submit(stream, kernel(how));
  return cudaSuccess;
}

// Between __cudaPushCallConfiguration and the stub that pops it.
struct CallConfiguration {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};

thread_local std::optional<CallConfiguration> pushed;

}  // namespace

void end_for_unknown(const std::string& kernel) {
  std::fprintf(stderr,
               "CUDA simulator: it has no version for the host of the kernel\n  %s\n"
               "HORON_SIMULATOR_IGNORE_KERNELS=1 would leave such kernels out.\n",
               kernel.c_str());
  std::abort();
}

}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}
HORON_SIMULATOR_EXPORT void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
HORON_SIMULATOR_EXPORT void __cudaUnregisterFatBinary(void** /*handle*/) {}

HORON_SIMULATOR_EXPORT void __cudaRegisterFunction(void** /*handle*/, const char* stub,
                                                   char* /*device_function*/, const char* name,
                                                   int /*thread_limit*/, uint3* /*thread*/,
                                                   uint3* /*block*/, dim3* /*block_size*/,
                                                   dim3* /*grid_size*/, int* /*warp_size*/) {
  Kernels& kernels = Kernels::get();
  const std::lock_guard lock(kernels.mutex);
  kernels.of_stub[stub] = {name, std::nullopt};
}

HORON_SIMULATOR_EXPORT void __cudaRegisterVar(void** /*handle*/, char* /*host*/, char* /*device*/,
                                              const char* /*name*/, int /*is_external*/,
                                              std::size_t /*bytes*/, int /*is_constant*/,
                                              int /*is_global*/) {}

HORON_SIMULATOR_EXPORT void __cudaRegisterManagedVar(void** /*handle*/, void** /*host*/,
                                                     char* /*device*/, const char* /*name*/,
                                                     int /*is_external*/, std::size_t /*bytes*/,
                                                     int /*is_constant*/, int /*is_global*/) {}

HORON_SIMULATOR_EXPORT char __cudaInitModule(void** /*handle*/) { return 1; }

HORON_SIMULATOR_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block,
                                                            std::size_t shared_bytes,
                                                            cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

HORON_SIMULATOR_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                                              std::size_t* shared_bytes,
                                                              void* stream) {
  if (!pushed) {
    return failed(cudaErrorMissingConfiguration);
  }
  *grid = pushed->grid;
  *block = pushed->block;
  *shared_bytes = pushed->shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed->stream;
  pushed.reset();
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block,
                                                    void** arguments, std::size_t /*shared_bytes*/,
                                                    cudaStream_t stream) {
  return launch(stub, {grid, block, arguments}, stream);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid,
                                                               dim3 block, void** arguments,
                                                               std::size_t /*shared_bytes*/,
                                                               cudaStream_t stream) {
  return launch(stub, {grid, block, arguments}, stream);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                                       const void* stub, void** arguments) {
  return launch(stub, {config->gridDim, config->blockDim, arguments}, config->stream);
}

// The handle of a kernel is its stub.
HORON_SIMULATOR_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                                      void** arguments,
                                                      std::size_t /*shared_bytes*/,
                                                      cudaStream_t stream) {
  return launch(kernel, {grid, block, arguments}, stream);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes,
                                                         const void* /*stub*/) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = 90;
  attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaFuncSetAttribute(const void* /*stub*/,
                                                        cudaFuncAttribute /*attribute*/,
                                                        int /*value*/) {
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* n_blocks, const void* /*stub*/, int block_size, std::size_t /*shared_bytes*/,
    unsigned /*flags*/) {
  *n_blocks = block_size > 0 ? std::max(1, 2048 / block_size) : 0;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* n_blocks, const void* stub, int block_size, std::size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n_blocks, stub, block_size,
                                                                shared_bytes, 0);
}
