#include "shm/process_watch.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "core/error.h"
#include "shm/liveness.h"

namespace horon {
namespace {

std::uint64_t own_pid_namespace() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// Field 22 of /proc/<pid>/stat; 0 when it can not be read.
std::uint64_t start_time_of(const std::string& process) {
  std::ifstream file(concat("/proc/", process, "/stat"));
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // The second field is the program's name in parentheses, which may hold anything.
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos) {
    return 0;
  }
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) {
    fields >> skipped;
  }
  std::uint64_t ticks = 0;
  return fields >> ticks ? ticks : 0;
}

}  // namespace

ProcessIdentity own_process() {
  ProcessIdentity own{::getpid(), own_pid_namespace(), start_time_of("self")};
  if (own.start_time != start_time_of(std::to_string(own.pid))) {
    own.pid_namespace = 0;  // /proc is another namespace's
  }
  return own;
}

ProcessWatch::ProcessWatch(const ProcessIdentity& process) {
  const ProcessIdentity own = own_process();
  const bool can_be_seen = process.pid_namespace != 0 && process.start_time != 0 &&
                           process.pid_namespace == own.pid_namespace;
  if (!can_be_seen) {
    return;
  }
#ifdef SYS_pidfd_open
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
  if (!pidfd) {
    was_gone_ = errno == ESRCH;
    return;
  }
  // Read after the descriptor was made, so that both are of the same process. Nothing to read: it
  // ended just now, of which the descriptor tells, or this process may open no more files.
  const std::uint64_t start_time = start_time_of(std::to_string(process.pid));
  was_gone_ = start_time != 0 && start_time != process.start_time;
  if (!was_gone_) {
    pidfd_ = std::move(pidfd);
  }
#endif
}

bool ProcessWatch::has_ended() const {
  return was_gone_ || (pidfd_ && horon::has_ended(pidfd_.get()));
}

bool ProcessWatch::is_alive() const { return pidfd_ && !has_ended(); }

}  // namespace horon
