#include "process_arena.h"

#include <ATen/EmptyTensor.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/log.h"
#include "core/options.h"
#include "errors.h"
#include "shm/memory_limit.h"
#include "tensor_memory.h"

namespace horon::torch_backend {
namespace {

// Only address space until tensors are made: see Arena.
constexpr std::size_t kMaxDefaultBytes = std::size_t{1} << 40;
constexpr std::size_t kUnknownMemoryBytes = std::size_t{16} << 30;

std::size_t default_budget_bytes() {
  const std::uint64_t memory = usable_memory_bytes().value_or(2 * kUnknownMemoryBytes);
  return std::min<std::size_t>(memory / 2, kMaxDefaultBytes);
}

struct State {
  std::uint32_t fork_generation = horon::fork_generation();
  ArenaAccess access;
  bool is_off = false;
  std::string refusal;  // why the system gave none
};

// Never destroyed, and left alone in a forked child, which may make its own.
std::atomic<State*> current{nullptr};
std::mutex making;  // held while `current` is set

void make_private_in_child() {
  State* const parents = current.load(std::memory_order_relaxed);
  if (parents != nullptr && parents->access.own) {
    (void)parents->access.own->become_private();
  }
}

State* make_state() {
  const std::size_t budget = arena_bytes_from_environment().value_or(default_budget_bytes());
  auto* state = new State();
  state->is_off = budget == 0;
  state->access.mapped = std::make_shared<PeerArenas>();
  state->access.lent = std::make_shared<LentMemory>();
  if (!state->is_off) {
    try {
      state->access.own = std::make_shared<Arena>(budget);
    } catch (const Error& error) {
      state->refusal = concat("no arena for tensors (", budget, " bytes): ", error.what(),
                              ". Set HORON_ARENA_BYTES to a smaller number, or to 0.");
      log_warning(state->refusal);
    }
  }
  return state;
}

State& state() {
  State* known = current.load(std::memory_order_acquire);
  if (known != nullptr && known->fork_generation == fork_generation()) {
    return *known;
  }
  const std::lock_guard lock(making);
  known = current.load(std::memory_order_relaxed);
  if (known == nullptr || known->fork_generation != fork_generation()) {
    static const int registered = ::pthread_atfork(nullptr, nullptr, make_private_in_child);
    (void)registered;
    known = make_state();
    current.store(known, std::memory_order_release);
  }
  return *known;
}

void free_in_arena(void* data) {
  // Pointers of a parent's arena belong to no block of a child's, and are left alone.
  State* const known = current.load(std::memory_order_acquire);
  if (data != nullptr && known->access.own) {
    known->access.own->free(static_cast<std::byte*>(data));
  }
}

class TensorAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_in_arena, c10::Device(c10::kCPU)};
    }
    try {
      Arena& arena = process_arena();
      state().access.lent->sweep();  // what nobody wants any more may be what is missing
      void* data = arena.allocate(bytes);
      return {data, data, &free_in_arena, c10::Device(c10::kCPU)};
    } catch (const Error& error) {
      C10_THROW_ERROR(OutOfMemoryError, concat("horon: ", error.what()));
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_in_arena; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

constexpr c10::DispatchKeySet kCpuTensors{c10::DispatchKey::CPU};

}  // namespace

ArenaAccess arena_access() { return state().access; }

Arena& process_arena() {
  const State& known = [&]() -> State& {
    try {
      return state();
    } catch (...) {
      rethrow_translated();
    }
  }();
  TORCH_CHECK_VALUE(!known.is_off,
                    "horon: the arena is off: HORON_ARENA_BYTES is 0. Unset it, or set it to the ",
                    "number of bytes that tensors may take there.");
  TORCH_CHECK_WITH(OutOfMemoryError, known.access.own, "horon: ", known.refusal);
  return *known.access.own;
}

c10::Allocator* arena_allocator() {
  static TensorAllocator allocator;
  return &allocator;
}

at::Tensor empty_in_arena(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(
      at::detail::empty_generic(sizes, arena_allocator(), kCpuTensors, dtype, std::nullopt));
}

at::Tensor empty_like_in_arena(const at::Tensor& like, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(like.layout() == c10::kStrided,
                    "horon: empty_like: expected a dense tensor, got layout ", like.layout(), ".");
  // Torch's own rules for strides, without memory.
  const at::Tensor plan = at::empty_like(like, like.options().device(c10::kMeta));
  return at::Tensor(at::detail::empty_strided_generic(plan.sizes(), plan.strides(),
                                                      arena_allocator(), kCpuTensors,
                                                      dtype.value_or(like.scalar_type())));
}

std::optional<at::Tensor> result_in_arena(const at::Tensor& tensor) {
  constexpr std::size_t kLeastBytes = std::size_t{1} << 20;
  if (tensor.layout() != c10::kStrided || !tensor.is_cpu() || tensor.nbytes() < kLeastBytes ||
      !tensor.is_contiguous() || !has_memory(tensor)) {
    return std::nullopt;
  }
  try {
    return empty_in_arena(tensor.sizes(), tensor.scalar_type());
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

bool is_in_arena(const at::Tensor& tensor) {
  const State* const known = current.load(std::memory_order_acquire);
  return known != nullptr && known->access.own && tensor.defined() && tensor.is_cpu() &&
         tensor.has_storage() && tensor.storage().data() != nullptr &&
         known->access.own->contains(tensor.storage().data(), tensor.storage().nbytes());
}

bool is_in_arena(const void* data) {
  const State* const known = current.load(std::memory_order_acquire);
  return known != nullptr && known->access.own && data != nullptr &&
         known->access.own->contains(static_cast<const std::byte*>(data), 1);
}

c10::DataPtr move_storage_to_arena(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr moved = arena_allocator()->allocate(storage.nbytes());
  std::memcpy(moved.mutable_get(), storage.data(), storage.nbytes());
  return storage.unsafeGetStorageImpl()->set_data_ptr(std::move(moved));
}

ArenaStatistics arena_statistics() {
  const State& known = state();
  return known.access.own ? known.access.own->statistics() : ArenaStatistics{};
}

}  // namespace horon::torch_backend
