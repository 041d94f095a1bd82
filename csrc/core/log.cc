#include "core/log.h"

#include <unistd.h>

#include <mutex>
#include <set>

namespace horon {

void log_warning(const std::string& message) {
  const std::string line = "[horon] " + message + "\n";
  // A failed write to stderr has nowhere to be reported.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

void log_warning_once(const std::string& cause, const std::string& message) {
  static std::mutex mutex;
  static auto* const known = new std::set<std::string>();  // may be needed while the process exits
  {
    const std::lock_guard lock(mutex);
    if (!known->insert(cause).second) {
      return;
    }
  }
  log_warning(message);
}

}  // namespace horon
