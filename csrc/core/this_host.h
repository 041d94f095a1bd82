// What ranks on other hosts call this one.
#pragma once

#include <string>

namespace horon {

// At most 63 bytes, so that it fits into a greeting and names of processes are alike everywhere.
std::string this_host();

}  // namespace horon
