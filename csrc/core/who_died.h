// Who died, where a device or a library says only that a connection broke.
//
// Note [Whose connection it was]
// Where ranks talk over sockets, NCCL reports that a connection broke before the process at its
// other end can be seen to have ended, and does not say whose it was. A process that ends closes
// its files one by one, a GPU's among them, and has ended only after that.
#pragma once

#include <string>

#include "core/function_ref.h"

namespace horon {

// `reason` and, in parentheses, what `find_dead` says: an empty string as long as it knows of
// nobody. It is asked for up to two seconds, in which this blocks.
std::string with_the_dead(const std::string& reason, FunctionRef<std::string()> find_dead);

}  // namespace horon
