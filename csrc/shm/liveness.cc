#include "shm/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <string>

#include "core/error.h"
#include "core/log.h"

namespace horon {
namespace {

// The two ends of this process's pipe. Packed, so that threads that make groups at the same time
// agree on one pipe without a lock, which a fork could leave locked. The write end stays open until
// the process ends: that is what it is for.
struct Pipe {
  int read_end = -1;
  int write_end = -1;
};
static_assert(std::atomic<Pipe>::is_always_lock_free);
constinit std::atomic<Pipe> own_pipe{Pipe{}};

// The child is another process: its life has its own pipe, and it must not keep the parent's open.
void close_pipe_in_child() {
  const Pipe parents = own_pipe.exchange(Pipe{});
  if (parents.write_end >= 0) {
    ::close(parents.write_end);
    ::close(parents.read_end);
  }
}

// Once per process: what is to be known when somebody wonders why a death was noticed late.
bool prepare_pipes(int pidfd_error) {
  ::pthread_atfork(nullptr, nullptr, close_pipe_in_child);
  log_warning(concat(system_error_text("pidfd_open", pidfd_error),
                     "; watching peers through pipes instead"));
  return true;
}

Pipe pipe_of_this_process() {
  Pipe pipe = own_pipe.load();
  if (pipe.write_end >= 0) {
    return pipe;
  }
  int ends[2];
  HORON_CHECK(::pipe2(ends, O_CLOEXEC) == 0, system_error_text("pipe2", errno));
  const Pipe made{ends[0], ends[1]};
  if (own_pipe.compare_exchange_strong(pipe, made)) {
    return made;
  }
  ::close(ends[0]);
  ::close(ends[1]);
  return pipe;  // another thread's
}

}  // namespace

UniqueFd open_own_liveness() {
#ifdef SYS_pidfd_open
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (pidfd) {
    return pidfd;
  }
  const int error = errno;
  // A pipe would need descriptors as well.
  HORON_CHECK(error != EMFILE && error != ENFILE, system_error_text("pidfd_open", error));
#else
  const int error = ENOSYS;
#endif
  [[maybe_unused]] static const bool is_prepared = prepare_pipes(error);
  UniqueFd copy(::fcntl(pipe_of_this_process().read_end, F_DUPFD_CLOEXEC, 0));
  HORON_CHECK(copy, system_error_text("fcntl(F_DUPFD_CLOEXEC)", errno));
  return copy;
}

bool has_ended(int liveness_fd) {
  pollfd entry{liveness_fd, POLLIN, 0};
  // pidfd: POLLIN once the process is gone. Pipe: POLLHUP. An error of poll itself says nothing.
  return ::poll(&entry, 1, 0) > 0 && entry.revents != 0;
}

std::string why_it_rests(int liveness_fd) {
  // A pidfd tells what its process is called in this namespace.
  std::ifstream about(concat("/proc/self/fdinfo/", liveness_fd));
  pid_t pid = 0;
  for (std::string word; about >> word;) {
    if (word == "Pid:" && about >> pid) {
      break;
    }
  }
  if (pid <= 0) {
    return {};
  }
  std::ifstream status(concat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(status, line);
  const auto name_end = line.rfind(')');  // the name may hold anything
  const char state = name_end + 2 < line.size() ? line[name_end + 2] : '?';
  if (state == 'T') {
    return "is stopped (SIGSTOP or Ctrl-Z; SIGCONT lets it go on)";
  }
  return state == 't' ? "is held by a debugger" : "";
}

}  // namespace horon
