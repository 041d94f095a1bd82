// What others want called: when an operation has completed, and before a group ends in error.
#pragma once

#include <cstdint>
#include <memory>

#include "abort_hooks.h"
#include "hook_table.h"

namespace horon::torch_backend {

// What works and groups share of a backend. Shared ownership: a Work may outlive the backend.
struct Hooks {
  HookTable<std::uint64_t> on_completion;  // the argument is the Work's completion key
  const std::shared_ptr<AbortHooks> on_abort = std::make_shared<AbortHooks>();
};

}  // namespace horon::torch_backend
