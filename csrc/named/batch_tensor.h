// What a batch is made of.
#pragma once

#include <memory>

#include "named/named_operation.h"

namespace horon {

// One tensor of an agreed operation. Without an operation this rank has joined: it takes part with
// zeros, or with no rows.
struct BatchTensor {
  RequestPtr request;
  std::size_t tensor = 0;
  std::shared_ptr<NamedOperation> operation;

  const TensorSpec& spec() const { return request->tensors[tensor]; }
  // This rank's own; null where it has joined.
  const NamedOperation::Tensor* own() const {
    return operation ? &operation->tensors[tensor] : nullptr;
  }
};

}  // namespace horon
