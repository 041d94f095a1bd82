// Whether what two ranks announced under one name can be one operation.
#pragma once

#include <optional>
#include <string>

#include "named/named_request.h"

namespace horon {

// Pure. The error text, in Horovod's words, with the ranks' numbers and the tensor's name; nothing
// when the two fit together. Priorities may differ.
std::optional<std::string> find_mismatch(const NamedRequest& a, int rank_a, const NamedRequest& b,
                                         int rank_b);

}  // namespace horon
