// What the operators and the bound functions have in common.
#pragma once

#include <string_view>

#include "backend.h"

namespace horon::torch_backend {

// "sum", "avg", ... Throws ValueError for anything else.
c10d::ReduceOp reduce_op_named(std::string_view name);

}  // namespace horon::torch_backend
