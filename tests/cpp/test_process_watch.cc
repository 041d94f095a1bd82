#include "shm/process_watch.h"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "catch.h"
#include "core/unique_fd.h"

using namespace horon;

namespace {

// A child that does nothing; what it says of itself.
class Child {
 public:
  Child() {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const ProcessIdentity own = own_process();
      (void)!::write(ends[1], &own, sizeof own);
      ::pause();
      ::_exit(0);
    }
    REQUIRE(::read(ends[0], &identity_, sizeof identity_) == sizeof identity_);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    kill();
    reap();
  }

  const ProcessIdentity& identity() const { return identity_; }
  void kill() const {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
    }
  }
  void reap() {
    if (pid_ > 0) {
      ::waitpid(pid_, nullptr, 0);
      pid_ = -1;
    }
  }

 private:
  pid_t pid_ = -1;
  ProcessIdentity identity_;
};

// Sandboxes may forbid it; then nothing is known of anybody.
bool can_watch() {
#ifdef SYS_pidfd_open
  return static_cast<bool>(UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))));
#else
  return false;
#endif
}

bool ends_within_seconds(const ProcessWatch& watch) {
  for (int turn = 0; turn < 500 && !watch.has_ended(); ++turn) {
    ::usleep(20'000);
  }
  return watch.has_ended();
}

}  // namespace

TEST_CASE("a process knows who it is") {
  const ProcessIdentity own = own_process();
  REQUIRE(own.pid == ::getpid());
  REQUIRE(own.pid_namespace != 0);
  REQUIRE(own.start_time != 0);
  REQUIRE_FALSE(ProcessWatch(own).has_ended());
}

TEST_CASE("the end of another process is seen, before and after its parent has asked for it") {
  if (!can_watch()) {
    WARN("pidfd_open is not permitted here");
    return;
  }
  Child child;
  REQUIRE(child.identity().start_time >= own_process().start_time);
  const ProcessWatch watch(child.identity());
  REQUIRE_FALSE(watch.has_ended());
  child.kill();
  REQUIRE(ends_within_seconds(watch));
  REQUIRE(ProcessWatch(child.identity()).has_ended());  // nobody has waited for it
  child.reap();
  REQUIRE(watch.has_ended());
  REQUIRE(ProcessWatch(child.identity()).has_ended());  // gone altogether
}

TEST_CASE("a pid that is another process's by now") {
  if (!can_watch()) {
    WARN("pidfd_open is not permitted here");
    return;
  }
  ProcessIdentity earlier = own_process();
  --earlier.start_time;
  REQUIRE(ProcessWatch(earlier).has_ended());
}

TEST_CASE("of a process that can not be seen nothing is known") {
  ProcessIdentity elsewhere = own_process();
  ++elsewhere.pid_namespace;
  --elsewhere.start_time;
  REQUIRE_FALSE(ProcessWatch(elsewhere).has_ended());
  elsewhere.pid_namespace = 0;
  REQUIRE_FALSE(ProcessWatch(elsewhere).has_ended());
  REQUIRE_FALSE(ProcessWatch().has_ended());
}
