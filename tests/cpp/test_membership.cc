#include "members/membership.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <vector>

#include "catch.h"
#include "core/error.h"
#include "shm/boot_id.h"

using namespace horon;

namespace {

std::string handle_of(int rank, std::uint64_t instance) {
  return MemberHandle{rank, instance, "boot", {100 + rank, 5, 6}}.encode();
}

// By rank.
std::vector<std::uint64_t> instances_of(const Membership& membership) {
  std::vector<std::uint64_t> instances;
  for (const MemberHandle& member : membership.members) {
    instances.push_back(member.instance);
  }
  return instances;
}

}  // namespace

TEST_CASE("member handle: what is encoded comes back") {
  const MemberHandle own = own_handle(3, 0xfedcba9876543210ULL);
  REQUIRE(own.process.pid == ::getpid());
  REQUIRE(own.boot_id == boot_id());
  for (const MemberHandle& handle :
       {own, MemberHandle{}, MemberHandle{-1, ~0ULL, "", {1, ~0ULL, ~0ULL}}}) {
    REQUIRE(MemberHandle::decode(handle.encode()) == handle);
  }
}

TEST_CASE("member handle: what is none is refused, and named") {
  const std::string good = handle_of(1, 0xabc);
  REQUIRE(good == "horon:1:abc:boot:101:5:6");
  for (const std::string& bad : std::vector<std::string>{
           "", "horon", good + ":", good + " ", ":" + good, "gloo:1:abc:boot:101:5:6",
           "horon:x:abc:boot:101:5:6", "horon::abc:boot:101:5:6", "horon:1:xyz:boot:101:5:6",
           "horon:1:abc:boot:101:5", "horon:1:abc:boot:101:-5:6", "horon:1:abc:boot:101:5:6x",
           "horon:99999999999:abc:boot:101:5:6", "horon:1:1fffffffffffffffff:boot:101:5:6"}) {
    CAPTURE(bad);
    REQUIRE_THROWS_WITH(MemberHandle::decode(bad),
                        Catch::Contains("'" + bad + "' is no handle of a horon group"));
  }
}

TEST_CASE("membership: a list gives the order") {
  const std::vector<std::string> handles = {handle_of(2, 7), handle_of(0, 9), handle_of(1, 8)};
  const Membership plan = plan_membership(handles, true, 9);
  REQUIRE(plan.rank == 1);
  REQUIRE(instances_of(plan) == std::vector<std::uint64_t>{7, 9, 8});
  REQUIRE(own_member(plan).instance == 9);
}

TEST_CASE("membership: without an order ranks keep theirs, newcomers by instance") {
  // 10 comes after 9, as a number.
  const std::vector<std::string> handles = {handle_of(10, 1), handle_of(9, 2), handle_of(0, 4),
                                            handle_of(0, 3)};
  for (const std::uint64_t own : {1U, 2U, 3U, 4U}) {
    const Membership plan = plan_membership(handles, false, own);
    REQUIRE(instances_of(plan) == std::vector<std::uint64_t>{3, 4, 2, 1});
    REQUIRE(own_member(plan).instance == own);
  }
}

TEST_CASE("membership: the digest tells members and their order apart, and nothing else") {
  const auto digest = [](const std::vector<std::string>& handles, std::uint64_t own) {
    return plan_membership(handles, true, own).digest;
  };
  const std::vector<std::string> three = {handle_of(0, 1), handle_of(1, 2), handle_of(2, 3)};
  REQUIRE(digest(three, 1) == digest(three, 3));
  REQUIRE(digest(three, 1) != digest({three[0], three[1]}, 1));
  REQUIRE(digest(three, 1) != digest({three[1], three[0], three[2]}, 1));
  // A handle that was made when the group was another one.
  REQUIRE(digest(three, 1) == digest({handle_of(5, 1), three[1], three[2]}, 1));
}

TEST_CASE("membership: what can be no group") {
  const std::string one = handle_of(0, 1);
  REQUIRE_THROWS_WITH(plan_membership({}, true, 1), Catch::Contains("got none"));
  REQUIRE_THROWS_WITH(plan_membership({one, handle_of(1, 2), one}, true, 1),
                      Catch::Contains("process 100 comes twice, as rank 0 and as rank 2"));
  REQUIRE_THROWS_WITH(plan_membership({one}, true, 2),
                      Catch::Contains("none of the 1 handles is this process's own"));
  REQUIRE_THROWS_AS(plan_membership({one, "nonsense"}, true, 1), UsageError);
}

TEST_CASE("membership: who has ended is named, and nobody whom one can not see") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const ProcessIdentity identity = own_process();
    (void)!::write(ends[1], &identity, sizeof identity);
    ::pause();
    ::_exit(0);
  }
  ProcessIdentity identity;
  REQUIRE(::read(ends[0], &identity, sizeof identity) == sizeof identity);
  ::close(ends[0]);
  ::close(ends[1]);
  const MemberHandle own = own_handle(0, 1);
  const auto watching = [&](const std::string& boot) {
    return MemberWatch(
        plan_membership({own.encode(), MemberHandle{1, 2, boot, identity}.encode()}, true, 1));
  };
  const MemberWatch seen = watching(own.boot_id);
  const MemberWatch elsewhere = watching("another machine");
  REQUIRE_NOTHROW(seen.check("it came"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  REQUIRE_THROWS_WITH(seen.check("it came"),
                      "rank 1 (pid " + std::to_string(child) + ") has ended before it came");
  REQUIRE_THROWS_AS(watching(own.boot_id).check("it came"), PeerLostError);
  REQUIRE_NOTHROW(elsewhere.check("it came"));
}
