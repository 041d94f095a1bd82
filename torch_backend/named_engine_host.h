// A NamedEngine with what it needs from torch: the store, the process sets' groups, the arena.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compat.h"
#include "core/fork_guard.h"
#include "named/named_engine.h"
#include "named_operation_builder.h"

namespace horon::torch_backend {

using NamedGlooMaker = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&, int, int)>;

// Thread safety: all methods. None may be called with the GIL held, but is_running and poll.
class NamedEngineHost {
 public:
  // Blocks until all ranks have met.
  NamedEngineHost(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout, NamedGlooMaker make_gloo);
  // Does nothing in a forked child, whose threads are somebody else's.
  ~NamedEngineHost();

  // Throws UsageError when there is no such set.
  SetView view(int process_set) const;

  std::uint64_t submit(const OperationPtr& operation, bool will_wait);
  bool poll(std::uint64_t handle) const;
  // Throws the operation's error.
  TensorList wait(std::uint64_t handle);
  std::uint64_t join();
  std::uint64_t barrier(int process_set);
  int add_process_set(std::vector<int> ranks);
  bool remove_process_set(int id);
  // Throws in a forked child.
  NamedEngine& engine() const;
  int rank() const { return rank_; }

 private:
  int change_sets(const OperationPtr& operation);

  const std::uint32_t fork_generation_ = fork_generation();
  const int rank_;
  const int size_;
  std::unique_ptr<NamedEngine> engine_;
};

}  // namespace horon::torch_backend
