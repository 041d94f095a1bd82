// What the operators and the bound functions have in common.
#pragma once

#include <string_view>

#include "backend.h"

namespace horon::torch_backend {

// "sum", "avg", ... Throws ValueError for anything else.
c10d::ReduceOp reduce_op_named(std::string_view name);

// Blocks. False, and nothing done, where the group's CPU backend is not horon itself, but is
// wrapped or another one.
bool all_reduce_in_group(const at::Tensor& tensor, std::string_view op,
                         std::string_view group_name);

}  // namespace horon::torch_backend
