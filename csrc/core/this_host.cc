#include "core/this_host.h"

#include <unistd.h>

namespace horon {

std::string this_host() {
  char host[64] = {};
  ::gethostname(host, sizeof host - 1);
  return host;
}

}  // namespace horon
