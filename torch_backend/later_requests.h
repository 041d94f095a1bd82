// The part of a call that depends on what its first requests bring.
#pragma once

#include <vector>

#include "core/request.h"

namespace horon::torch_backend {

// Thread safety: one thread at a time: whoever has the call's turn.
class LaterRequests {
 public:
  virtual ~LaterRequests() = default;

  // Before the first requests run, in their turn: an earlier operation may still write the tensors.
  virtual void prepare() = 0;
  // When they have run. Throws MismatchError where what they brought shows that the ranks disagree,
  // on every rank. What is only this rank's trouble is a request's refusal: the others expect it.
  virtual std::vector<Request> next() = 0;
  // When those have run.
  virtual void finish() = 0;
};

}  // namespace horon::torch_backend
