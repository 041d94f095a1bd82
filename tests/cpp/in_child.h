// A body that runs in a forked child.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"

namespace horon::testing {

// Exit code of a child that runs `body`; it is killed when it takes too long.
template <typename Body>
int in_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(300);
    ::_exit(body());
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace horon::testing
