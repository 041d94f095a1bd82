// From the engine's exceptions to the ones that torch.distributed's users expect.
#pragma once

#include <exception>

namespace horon::torch_backend {

// Mismatches, deaths and timeouts become c10::DistBackendError, bad arguments c10::ValueError; what
// is not the engine's own passes through. Call inside a catch block.
[[noreturn]] void rethrow_translated();

// The same for an exception that was kept.
std::exception_ptr translated(const std::exception_ptr& error);

// True for errors after which the group can not go on.
bool ends_group(const std::exception_ptr& error);

// What a Work may keep of an error: Python's exceptions belong to the call that they interrupted,
// and can be raised once only.
std::exception_ptr without_python(const std::exception_ptr& error);

}  // namespace horon::torch_backend
