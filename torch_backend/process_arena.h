// The arena of this process, and tensors in it.
//
// Note [Process arena]
// One per process, for all groups, made when the first group or the first arena tensor is. It lives
// until the process ends: tensors may be freed at any time, also while the interpreter is taken
// apart. A forked child that wants one gets a new one, and its parent's tensors stay readable there
// (Note [Arena after fork]).
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>

#include "shm/rendezvous.h"

namespace horon::torch_backend {

// The arena and the peers' arenas, for rendezvous(). Without an own arena where HORON_ARENA_BYTES
// is 0 or the system refused one (logged once).
ArenaAccess arena_access();

// Throws c10::ValueError where the arena is off, c10::Error where the system refused it.
Arena& process_arena();

// Allocates in the process's arena; storages made with it stay there when they are resized.
c10::Allocator* arena_allocator();

// An uninitialised CPU tensor in the arena, contiguous. Throws c10::OutOfMemoryError when there is
// no room.
at::Tensor empty_in_arena(at::IntArrayRef sizes, at::ScalarType dtype);

// The same with sizes, strides (as torch.empty_like has them) and dtype of `like`.
at::Tensor empty_like_in_arena(const at::Tensor& like, std::optional<at::ScalarType> dtype);

// Uninitialised, for the result of reducing a large CPU tensor: the arena's memory is used again,
// whereas the system would give new pages each time. None for other tensors, and where the arena is
// off or has no room.
std::optional<at::Tensor> result_in_arena(const at::Tensor& tensor);

// Whether the tensor's memory lies in the arena of this process. False for empty tensors.
bool is_in_arena(const at::Tensor& tensor);
bool is_in_arena(const void* data);

// Moves the tensor's whole storage into the arena, contents included: all views of it follow.
// Returns what held its memory until now. Requires: a CPU tensor with a storage outside.
c10::DataPtr move_storage_to_arena(const at::Tensor& tensor);

ArenaStatistics arena_statistics();

}  // namespace horon::torch_backend
