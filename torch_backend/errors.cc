#include "errors.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "core/error.h"

namespace horon::torch_backend {

void rethrow_translated() {
  try {
    throw;
  } catch (const UsageError& error) {
    TORCH_CHECK_VALUE(false, "horon: ", error.what());
  } catch (const Error& error) {
    C10_THROW_ERROR(DistBackendError, std::string("horon: ") + error.what());
  }
  // Unreachable: what is not ours has left through the rethrow.
  std::abort();
}

std::exception_ptr translated(const std::exception_ptr& error) {
  if (!error) {
    return nullptr;
  }
  try {
    try {
      std::rethrow_exception(error);
    } catch (...) {
      rethrow_translated();
    }
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr without_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const pybind11::error_already_set&) {
    return std::make_exception_ptr(
        GroupError("a signal handler raised an exception in the middle of it, on this rank"));
  } catch (...) {  // classification only
    return error;
  }
}

bool ends_group(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const GroupError&) {
    return true;
  } catch (...) {  // classification only; the caller still holds the error
    return false;
  }
}

}  // namespace horon::torch_backend
