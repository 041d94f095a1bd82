// What errors of named operations become on their way to Python.
#pragma once

#include <stdexcept>

#include "core/error.h"
#include "errors.h"

namespace horon::torch_backend {

// Horovod's name for everything that is not the caller's fault.
class InternalError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bad arguments become ValueError, the rest of our errors HorovodInternalError.
template <typename Call>
auto translating_named(const Call& call) {
  try {
    return call();
  } catch (const UsageError&) {
    rethrow_translated();
  } catch (const Error& error) {
    throw InternalError(error.what());
  }
}

}  // namespace horon::torch_backend
