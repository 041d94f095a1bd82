// Kernels are known by the names that nvcc gave them, and run on the host.
#pragma once

#include <functional>
#include <string>

#include "cuda_api.h"

namespace horon::simulator {

// How a kernel was launched. `arguments` and what they point to live only until the launch returns.
struct Launch {
  dim3 grid;
  dim3 block;
  void** arguments;

  template <class T>
  const T& argument(int index) const {
    return *static_cast<const T*>(arguments[index]);
  }
};

// Takes what a launch needs of its arguments, and returns the work.
using HostKernel = std::function<std::function<void()>(const Launch&)>;

// The host's version of a kernel, by its demangled name; null if there is none. `name` begins with
// what the kernel returns and ends with its parameters.
HostKernel find_pack_kernel(const std::string& name);
HostKernel find_torch_kernel(const std::string& name);

// Ends the process with a message.
[[noreturn]] void end_for_unknown(const std::string& kernel);

}  // namespace horon::simulator
