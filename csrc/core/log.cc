#include "core/log.h"

#include <unistd.h>

namespace horon {

void log_warning(const std::string& message) {
  const std::string line = "[horon] " + message + "\n";
  // A failed write to stderr has nowhere to be reported.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace horon
