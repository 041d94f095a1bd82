#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "last_error.h"
#include "settings.h"
#include "streams.h"

namespace horon::simulator {
namespace {

// What was freed is given back to the system when this much has been freed after it.
constexpr std::size_t kQuarantineBytes = std::size_t{64} << 20;

std::size_t whole_pages(std::size_t bytes) {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

class Memory {
 public:
  // Null where the device has no more.
  void* allocate(std::size_t bytes, MemoryKind kind, int device) {
    const std::lock_guard lock(mutex_);
    if (kind == MemoryKind::kDevice &&
        bytes > settings().memory_bytes - std::min(settings().memory_bytes, used_[device])) {
      return nullptr;
    }
    void* pages = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
      return nullptr;
    }
    std::memset(pages, kPoison, bytes);
    insert({static_cast<char*>(pages), bytes, kind, device});
    return pages;
  }

  bool add_registered(void* begin, std::size_t bytes, int device) {
    const std::lock_guard lock(mutex_);
    if (find_locked(begin) || find_locked(static_cast<char*>(begin) + bytes - 1)) {
      return false;
    }
    insert({static_cast<char*>(begin), bytes, MemoryKind::kRegistered, device});
    return true;
  }

  // Poisons what was allocated, and forgets it. Requires that nothing uses it any more.
  void release(const Allocation& allocation) {
    const std::lock_guard lock(mutex_);
    allocations_.erase(allocation.begin);
    if (allocation.is_on_device()) {
      used_[allocation.device] -= allocation.bytes;
    }
    if (allocation.kind == MemoryKind::kRegistered) {
      return;
    }
    std::memset(allocation.begin, kPoison, allocation.bytes);
    quarantine_.push_back(allocation);
    quarantined_bytes_ += allocation.bytes;
    while (quarantined_bytes_ > kQuarantineBytes && quarantine_.size() > 1) {
      const Allocation oldest = quarantine_.front();
      quarantine_.pop_front();
      quarantined_bytes_ -= oldest.bytes;
      munmap(oldest.begin, whole_pages(oldest.bytes));
    }
  }

  std::optional<Allocation> find(const void* address) {
    const std::lock_guard lock(mutex_);
    return find_locked(address);
  }

  std::size_t used(int device) {
    const std::lock_guard lock(mutex_);
    return used_[device];
  }

 private:
  // Requires mutex_.
  void insert(const Allocation& allocation) {
    allocations_[allocation.begin] = allocation;
    if (allocation.is_on_device()) {
      used_[allocation.device] += allocation.bytes;
    }
  }

  // Requires mutex_.
  std::optional<Allocation> find_locked(const void* address) const {
    const auto* wanted = static_cast<const char*>(address);
    auto after = allocations_.upper_bound(wanted);
    if (after == allocations_.begin()) {
      return std::nullopt;
    }
    const Allocation& candidate = std::prev(after)->second;
    return wanted < candidate.begin + candidate.bytes ? std::optional(candidate) : std::nullopt;
  }

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<const char*, Allocation> allocations_;
  std::map<int, std::size_t> used_;
  std::deque<Allocation> quarantine_;
  std::size_t quarantined_bytes_ = 0;
};

// Never freed: streams use it until the process is gone.
Memory& memory() {
  static auto* const all = new Memory;
  return *all;
}

cudaError_t allocate(void** pointer, std::size_t bytes, MemoryKind kind) {
  if (!is_device(current_device())) {
    return failed(cudaErrorNoDevice);
  }
  *pointer = nullptr;
  if (bytes > 0) {
    *pointer = memory().allocate(bytes, kind, current_device());
    if (*pointer == nullptr) {
      return failed(cudaErrorMemoryAllocation);
    }
  }
  return cudaSuccess;
}

// Frees what begins at `pointer`, once all devices are done: any of them may still use it.
cudaError_t release(void* pointer, bool is_on_device) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const std::optional<Allocation> found = memory().find(pointer);
  const bool is_ours = found && found->begin == pointer && found->kind != MemoryKind::kRegistered;
  if (!is_ours || (found->kind != MemoryKind::kPinned) != is_on_device) {
    return failed(cudaErrorInvalidValue);
  }
  for (int index = 0; is_device(index); ++index) {
    device(index).synchronize();
  }
  memory().release(*found);
  return cudaSuccess;
}

}  // namespace

std::optional<Allocation> find_allocation(const void* address) { return memory().find(address); }
std::size_t allocated_bytes(int device) { return memory().used(device); }

}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return allocate(pointer, bytes, MemoryKind::kDevice);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMallocManaged(void** pointer, std::size_t bytes,
                                                     unsigned /*flags*/) {
  return allocate(pointer, bytes, MemoryKind::kManaged);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaFree(void* pointer) {
  return release(pointer, /*is_on_device=*/true);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes,
                                                 unsigned /*flags*/) {
  return allocate(pointer, bytes, MemoryKind::kPinned);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return allocate(pointer, bytes, MemoryKind::kPinned);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaFreeHost(void* pointer) {
  return release(pointer, /*is_on_device=*/false);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaHostRegister(void* pointer, std::size_t bytes,
                                                    unsigned /*flags*/) {
  if (pointer == nullptr || bytes == 0) {
    return failed(cudaErrorInvalidValue);
  }
  return memory().add_registered(pointer, bytes, current_device())
             ? cudaSuccess
             : failed(cudaErrorHostMemoryAlreadyRegistered);
}

HORON_SIMULATOR_EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  const std::optional<Allocation> found = memory().find(pointer);
  if (!found || found->begin != pointer || found->kind != MemoryKind::kRegistered) {
    return failed(cudaErrorHostMemoryNotRegistered);
  }
  memory().release(*found);
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host,
                                                            unsigned /*flags*/) {
  const std::optional<Allocation> found = memory().find(on_host);
  if (!found || found->is_on_device()) {
    return failed(cudaErrorInvalidValue);
  }
  *on_device = on_host;
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                            const void* pointer) {
  *attributes = {};
  const std::optional<Allocation> found = memory().find(pointer);
  auto* address = const_cast<void*>(pointer);
  if (!found) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = address;
    return cudaSuccess;
  }
  attributes->device = found->device;
  attributes->devicePointer = address;
  switch (found->kind) {
    case MemoryKind::kDevice:
      attributes->type = cudaMemoryTypeDevice;
      break;
    case MemoryKind::kManaged:
      attributes->type = cudaMemoryTypeManaged;
      attributes->hostPointer = address;
      break;
    default:
      attributes->type = cudaMemoryTypeHost;
      attributes->hostPointer = address;
  }
  return cudaSuccess;
}

HORON_SIMULATOR_EXPORT cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  if (!is_device(current_device())) {
    return failed(cudaErrorNoDevice);
  }
  *total = settings().memory_bytes;
  *free_bytes = *total - std::min(*total, allocated_bytes(current_device()));
  return cudaSuccess;
}
