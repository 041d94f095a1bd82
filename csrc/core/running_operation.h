// Which collective this thread is in, for whoever wants to say so.
#pragma once

#include <string>

#include "core/header.h"
#include "core/request.h"

namespace horon {

// While it lives, this thread runs the operation. Scopes nest; the innermost counts.
// Ownership: a view of a name that outlives it.
class RunningOperation {
 public:
  explicit RunningOperation(const OperationName* operation) : outer_(current()) {
    current() = operation;
  }
  ~RunningOperation() { current() = outer_; }
  RunningOperation(const RunningOperation&) = delete;
  RunningOperation& operator=(const RunningOperation&) = delete;

  // Null outside of all.
  static const OperationName* of_this_thread() { return current(); }
  // For messages.
  static std::string description() {
    return current() == nullptr ? "an operation" : describe(*current());
  }

 private:
  static const OperationName*& current() {
    static thread_local const OperationName* operation = nullptr;
    return operation;
  }

  const OperationName* const outer_;
};

}  // namespace horon
