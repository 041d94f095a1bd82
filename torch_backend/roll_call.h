// All ranks of a job are there, and each is one process: before hvd.init() begins anything else.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>

namespace horon::torch_backend {

// Blocks until all ranks have come. Returns the number of this start, the same for all.
// `look_around` is called about every second; throws to give up.
// Throws what Python gets: DistBackendError for a rank that did not come in time, ValueError for
// two processes with one rank, or settings that differ.
std::int64_t call_roll(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, std::function<void()> look_around);

}  // namespace horon::torch_backend
