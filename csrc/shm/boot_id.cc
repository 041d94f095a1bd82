#include "shm/boot_id.h"

#include <fstream>

namespace horon {

std::string boot_id() {
  std::string id;
  std::ifstream(kBootIdFile) >> id;
  return id;
}

}  // namespace horon
