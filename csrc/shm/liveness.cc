#include "shm/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "core/error.h"
#include "core/log.h"

namespace horon {
namespace {

// The write end stays open until the process ends: that is what it is for.
int pipe_write_end = -1;
int pipe_read_end = -1;

void close_write_end_in_child() {
  if (pipe_write_end >= 0) {
    ::close(pipe_write_end);
    ::close(pipe_read_end);
    pipe_write_end = -1;
    pipe_read_end = -1;
  }
}

bool make_pipe() {
  int ends[2];
  HORON_CHECK(::pipe2(ends, O_CLOEXEC) == 0, system_error_text("pipe2", errno));
  pipe_read_end = ends[0];
  pipe_write_end = ends[1];
  ::pthread_atfork(nullptr, nullptr, close_write_end_in_child);
  log_warning("pidfd_open is not permitted here; watching peers through pipes instead");
  return true;
}

}  // namespace

UniqueFd open_own_liveness() {
#ifdef SYS_pidfd_open
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (pidfd) {
    return pidfd;
  }
#endif
  static const bool made = make_pipe();
  (void)made;
  UniqueFd copy(::fcntl(pipe_read_end, F_DUPFD_CLOEXEC, 0));
  HORON_CHECK(copy, system_error_text("fcntl(F_DUPFD_CLOEXEC)", errno));
  return copy;
}

bool has_ended(int liveness_fd) {
  pollfd entry{liveness_fd, POLLIN, 0};
  // pidfd: POLLIN once the process is gone. Pipe: POLLHUP. An error of poll itself says nothing.
  return ::poll(&entry, 1, 0) > 0 && entry.revents != 0;
}

}  // namespace horon
