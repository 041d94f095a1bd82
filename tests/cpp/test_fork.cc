// What a forked child may do with the objects of its parent: nothing, but that without harm.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include <memory>

#include "catch.h"
#include "core/fork_guard.h"
#include "core/lane.h"
#include "in_child.h"
#include "p2p/p2p_engine.h"
#include "p2p_endpoint.h"
#include "rank_threads.h"
#include "shm/liveness.h"

using namespace horon;
using namespace horon::testing;

TEST_CASE("a child knows that it is one, and so does its child") {
  const std::uint32_t here = fork_generation();
  REQUIRE(in_child([&] {
            if (fork_generation() != here + 1) {
              return 1;
            }
            const pid_t grandchild = ::fork();
            if (grandchild == 0) {
              ::_exit(fork_generation() == here + 2 ? 0 : 2);
            }
            int status = 0;
            ::waitpid(grandchild, &status, 0);
            return WEXITSTATUS(status);
          }) == 0);
  REQUIRE(fork_generation() == here);
}

TEST_CASE("a lane that never started a thread can be destroyed in a child") {
  auto lane = std::make_shared<Lane>();
  lane->run([] {});
  REQUIRE(in_child([&] {
            lane.reset();
            return 0;
          }) == 0);
  lane->close(patient(), [] {});
}

TEST_CASE("pidfds tell when a process has ended") {
  const UniqueFd own = open_own_liveness();
  REQUIRE(own);
  REQUIRE_FALSE(has_ended(own.get()));
#ifdef SYS_pidfd_open
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const UniqueFd life(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
  if (life) {
    REQUIRE_FALSE(has_ended(life.get()));
  }
  REQUIRE(::kill(child, SIGKILL) == 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  if (life) {
    REQUIRE(has_ended(life.get()));
  }
#endif
}

// ThreadSanitizer does not follow a fork while other threads run.
#ifndef HORON_TSAN

TEST_CASE("a lane with a sleeping thread can be destroyed in a child, and works on in the parent") {
  class Nothing final : public Task {
    void execute() noexcept override {}
    void complete() noexcept override {}
    void fail(const std::string&) noexcept override {}
  };
  auto lane = std::make_shared<Lane>();
  lane->submit(std::make_shared<Nothing>());
  lane->run([] {});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // asleep by now, most likely
  REQUIRE(in_child([&] {
            lane.reset();
            return 0;
          }) == 0);
  int ran = 0;
  lane->run([&] { ++ran; });
  REQUIRE(ran == 1);
  lane->close(patient(), [] {});
}

TEST_CASE(
    "a p2p engine with a sleeping thread can be destroyed in a child, and works on in the parent") {
  LocalGroup group(1);
  auto engine = std::make_shared<P2pEngine>(group.segment(0), group.peers(0), 512);
  std::byte data[8] = {};
  std::atomic<int> n_done{0};
  const auto exchange_with_self = [&] {
    for (const bool is_send : {false, true}) {
      auto op = std::make_shared<TestMessage>();
      op->is_send = is_send;
      op->data = data;
      op->bytes = sizeof data;
      op->deadline = patient();
      op->on_done = [&](std::exception_ptr, int) { ++n_done; };
      engine->start(op);
    }
  };
  exchange_with_self();
  while (n_done != 2) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  REQUIRE(in_child([&] {
            engine.reset();
            return 0;
          }) == 0);
  exchange_with_self();
  while (n_done != 4) {
    std::this_thread::yield();
  }
  engine->close(patient(), "done");
}

#endif
