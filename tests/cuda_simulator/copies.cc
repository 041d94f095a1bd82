// Copies and fills, asynchronous where CUDA's are ("API synchronization behavior" in its
// reference):
//
//   device to device           only enqueued, by cudaMemcpy too
//   pinned host and device     only enqueued by the Async functions
//   pageable host to device    the source is read before the function returns
//   device to pageable host    done when the function returns
//   host to host               done when the function returns
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "cuda_api.h"
#include "last_error.h"
#include "memory.h"
#include "streams.h"

namespace horon::simulator {
namespace {

enum class Side { kDevice, kPinned, kPageable };

Side side_of(const std::optional<Allocation>& allocation) {
  if (!allocation) {
    return Side::kPageable;
  }
  return allocation->is_on_device() ? Side::kDevice : Side::kPinned;
}

// False where the range leaves the allocation that it begins in.
bool fits(const std::optional<Allocation>& allocation, const void* begin, std::size_t bytes) {
  return !allocation || allocation->kind == MemoryKind::kRegistered ||
         static_cast<const char*>(begin) + bytes <= allocation->begin + allocation->bytes;
}

bool agrees(cudaMemcpyKind kind, Side destination, Side source) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return destination != Side::kDevice && source != Side::kDevice;
    case cudaMemcpyHostToDevice:
      return source != Side::kDevice;
    case cudaMemcpyDeviceToHost:
      return destination != Side::kDevice;
    default:
      return true;
  }
}

cudaError_t copy(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t handle, bool is_synchronous) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (bytes == 0) {
    return cudaSuccess;
  }
  const auto to = find_allocation(destination);
  const auto from = find_allocation(source);
  const Side to_side = side_of(to);
  const Side from_side = side_of(from);
  if (destination == nullptr || source == nullptr || !fits(to, destination, bytes) ||
      !fits(from, source, bytes)) {
    return failed(cudaErrorInvalidValue);
  }
  if (!agrees(kind, to_side, from_side)) {
    return failed(cudaErrorInvalidValue);
  }
  const bool is_on_device = to_side == Side::kDevice && from_side == Side::kDevice;
  const bool is_between_hosts = to_side != Side::kDevice && from_side != Side::kDevice;
  const bool waits = (is_synchronous && !is_on_device) || is_between_hosts ||
                     (from_side == Side::kDevice && to_side == Side::kPageable);
  Mark mark;
  if (from_side == Side::kPageable && !waits) {
    const auto* begin = static_cast<const char*>(source);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    mark = submit(stream, [destination, staged = std::move(staged)] {
      std::memcpy(destination, staged->data(), staged->size());
    });
  } else {
    mark = submit(stream, [=] { std::memmove(destination, source, bytes); });
  }
  if (waits) {
    mark.wait();
  }
  return cudaSuccess;
}

cudaError_t fill(void* pointer, int value, std::size_t bytes, cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const auto allocation = find_allocation(pointer);
  if (bytes > 0 && (!allocation || !fits(allocation, pointer, bytes))) {
    return failed(cudaErrorInvalidValue);
  }
  submit(stream, [=] { std::memset(pointer, value, bytes); });
  return cudaSuccess;
}

}  // namespace
}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT cudaError_t cudaMemcpy(void* destination, const void* source,
                                              std::size_t bytes, cudaMemcpyKind kind) {
  return copy(destination, source, bytes, kind, cudaStreamLegacy, /*is_synchronous=*/true);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMemcpyAsync(void* destination, const void* source,
                                                   std::size_t bytes, cudaMemcpyKind kind,
                                                   cudaStream_t stream) {
  return copy(destination, source, bytes, kind, stream, /*is_synchronous=*/false);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMemcpyPeerAsync(void* destination, int /*to*/,
                                                       const void* source, int /*from*/,
                                                       std::size_t bytes, cudaStream_t stream) {
  return copy(destination, source, bytes, cudaMemcpyDefault, stream, /*is_synchronous=*/false);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMemset(void* pointer, int value, std::size_t bytes) {
  return fill(pointer, value, bytes, cudaStreamLegacy);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t bytes,
                                                   cudaStream_t stream) {
  return fill(pointer, value, bytes, stream);
}
