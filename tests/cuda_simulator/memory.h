// The memory that CUDA knows of: of devices, pinned, registered. All of it is the host's.
//
// Fresh memory and memory that was freed hold kPoison: NaN in all floating-point types. What was
// freed stays readable for a while, so that a read too late is seen as wrong data.
#pragma once

#include <cstddef>
#include <optional>

#include "cuda_api.h"

namespace horon::simulator {

inline constexpr unsigned char kPoison = 0xff;

enum class MemoryKind { kDevice, kPinned, kRegistered, kManaged };

struct Allocation {
  char* begin;
  std::size_t bytes;
  MemoryKind kind;
  int device;

  bool is_on_device() const { return kind == MemoryKind::kDevice; }
};

// The allocation that holds an address; none for memory that CUDA does not know.
std::optional<Allocation> find_allocation(const void* address);

// Bytes on a device that are allocated.
std::size_t allocated_bytes(int device);

}  // namespace horon::simulator
