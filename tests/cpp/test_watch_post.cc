#include "watch/watch_post.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "catch.h"
#include "in_child.h"
#include "net/tcp_socket.h"
#include "rank_threads.h"
#include "watch/long_wait.h"

using namespace horon;
using namespace horon::testing;

namespace {

bool has_said(const std::optional<Answer>& answer, const std::string& part) {
  return answer && answer->text && answer->text->find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("watch post: says what its process waits for, computes, and adds") {
  const WatchPost post([](const Deadline&) { return std::string("Its main thread: f"); });
  const auto answer = ask(post.number(), patient());
  REQUIRE(has_said(answer, "is in no call of horon that has waited"));
  REQUIRE(has_said(answer, "% of a core.\nIts main thread: f"));
  REQUIRE(answer->pid == ::getpid());
  REQUIRE(has_said(ask(post.number(), patient()), "Its main thread"));  // again
}

TEST_CASE("watch post: nobody answers for one that does not exist") {
  std::uint64_t number = 0;
  {
    const WatchPost post({});
    number = post.number();
    REQUIRE(has_said(ask(number, patient()), "% of a core."));
  }
  REQUIRE_FALSE(ask(number, patient()).has_value());
  REQUIRE_FALSE(ask(0, patient()).has_value());
}

TEST_CASE("watch post: several in a process, and all can be found") {
  const WatchPost one([](const Deadline&) { return std::string("the one"); });
  const WatchPost other([](const Deadline&) { return std::string("the other"); });
  REQUIRE(one.number() != other.number());
  REQUIRE(has_said(ask(one.number(), patient()), "the one"));
  REQUIRE(has_said(ask(other.number(), patient()), "the other"));
  const auto found = find_watch_posts();
  REQUIRE(std::count(found.begin(), found.end(), one.number()) == 1);
  REQUIRE(std::count(found.begin(), found.end(), other.number()) == 1);
}

TEST_CASE("watch post: who does not answer in time is there all the same") {
  std::atomic<bool> may_go{false};
  const WatchPost post([&](const Deadline&) {
    while (!may_go) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::string();
  });
  const auto answer = ask(post.number(), soon());
  may_go = true;
  REQUIRE(answer.has_value());
  REQUIRE_FALSE(answer->text.has_value());
  REQUIRE(answer->is_late);
  REQUIRE(has_said(ask(post.number(), patient()), "% of a core."));  // nobody listened to the first
}

TEST_CASE("watch post: a long text is cut") {
  const WatchPost post([](const Deadline&) { return std::string(1 << 20, 'x'); });
  const auto answer = ask(post.number(), patient());
  REQUIRE(has_said(answer, "xxx"));
  REQUIRE(answer->text->size() < (std::size_t{1} << 17));
}

TEST_CASE("watch post: tells for whom its process waits, for whoever asks to go on there") {
  const Deadline deadline = patient();
  const std::vector<LateRank> late = {{"rank 1 (pid 101)", 17, ""},
                                      {"rank 2 (pid 9 on b)", 0, "", {"10.0.0.2", {5, 80}}}};
  const WatchPost post([](const Deadline&) { return std::string("Its main thread: f"); });
  for (const bool is_blocking : {true, false}) {
    LongWait wait;
    bool is_told = false;
    while (!is_told && !deadline.has_passed()) {
      wait.look(deadline, [&](bool) {
        is_told = true;
        return Waiting{"barrier #3 of a test", late, false, is_blocking};
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const auto answer = ask(post.number(), patient());
    REQUIRE(has_said(answer, "Its main thread: f"));
    REQUIRE(answer->post == post.number());
    REQUIRE(answer->late.size() == (is_blocking ? 2 : 0));
    if (is_blocking) {
      REQUIRE(answer->late[0].name == "rank 1 (pid 101)");
      REQUIRE(answer->late[0].post == 17);
      REQUIRE_FALSE(answer->late[0].door);
      REQUIRE(answer->late[1].name == "rank 2 (pid 9 on b)");
      REQUIRE(answer->late[1].door.address == "10.0.0.2");
      REQUIRE(answer->late[1].door.key.nonce == 5);
      REQUIRE(answer->late[1].door.key.port == 80);
    }
  }
}

TEST_CASE("watch post: an answer that is cut keeps for whom its process waits") {
  Answer answer;
  decode_answer(encode_answer(std::string(1 << 20, 'x'), {{"rank 1", 17, ""}}), &answer);
  REQUIRE(answer.text->size() > kMostAnswerBytes / 2);
  REQUIRE(answer.late.size() == 1);
  REQUIRE(encode_answer(std::string(1 << 20, 'x'), std::vector<LateRank>(1000)).size() <=
          kMostAnswerBytes);
  decode_answer("", &answer);
  REQUIRE(answer.text == "");
  REQUIRE(answer.late.empty());
}

TEST_CASE("watch door: asks who sits behind it, or another one of its host") {
  WatchPost post([](const Deadline&) { return std::string("the one"); });
  const WatchPost other([](const Deadline&) { return std::string("the other"); });
  const DoorKey key = post.open_door();
  REQUIRE(key);
  REQUIRE(post.open_door().port == key.port);
  for (const char* address : {"127.0.0.1", "::ffff:127.0.0.1"}) {
    const Door door{address, key};
    auto answer = ask_at(door, 0, patient());
    REQUIRE(has_said(answer, "the one"));
    REQUIRE(answer->post == post.number());
    REQUIRE(has_said(ask_at(door, post.number(), patient()), "the one"));
    answer = ask_at(door, other.number(), patient());
    REQUIRE(has_said(answer, "the other"));
    REQUIRE(answer->post == other.number());
  }
  REQUIRE(has_said(ask(post.number(), patient()), "the one"));  // as before
}

TEST_CASE("watch door: whoever asks at the same time as others gets the same answer") {
  std::atomic<int> n_told{0};
  WatchPost post([&](const Deadline&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return concat("answer ", ++n_told);
  });
  const Door door{"127.0.0.1", post.open_door()};
  require_no_errors(
      run_ranks(12, [&](int) { expect(has_said(ask_at(door, 0, patient()), "answer ")); }));
  REQUIRE(n_told < 12);
}

TEST_CASE("watch door: two that ask for each other's posts get answers") {
  WatchPost one([](const Deadline&) { return std::string("the one"); });
  WatchPost other([](const Deadline&) { return std::string("the other"); });
  const Door doors[] = {{"127.0.0.1", one.open_door()}, {"127.0.0.1", other.open_door()}};
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto answer = ask_at(doors[rank], rank == 0 ? other.number() : one.number(), patient());
    expect(has_said(answer, rank == 0 ? "the other" : "the one"));
  }));
}

TEST_CASE("watch door: other hosts get names with the host, and no door that leads nowhere") {
  Answer answer;
  answer.text = "waits in a, for rank 1 (pid 7), rank 2 (pid 8 on b), since 2 s. More (pid 7)";
  answer.late = {{"rank 1 (pid 7)", 1, ""}, {"rank 2 (pid 8 on b)", 0, "", {"10.0.0.2", {5, 80}}}};
  answer.late.push_back({"rank 3 (pid 9 on c)", 0, "", {"127.0.0.1", {6, 80}}});
  answer = for_other_hosts(answer, "a");
  REQUIRE(answer.text ==
          "waits in a, for rank 1 (pid 7 on a), rank 2 (pid 8 on b), since 2 s. More (pid 7)");
  REQUIRE(answer.late[0].name == "rank 1 (pid 7 on a)");
  REQUIRE(answer.late[1].name == "rank 2 (pid 8 on b)");
  REQUIRE(answer.late[1].door);
  REQUIRE_FALSE(answer.late[2].door);
}

TEST_CASE("watch door: nobody is let in without the nonce, and who says nothing disturbs nobody") {
  WatchPost post({});
  const DoorKey key = post.open_door();
  REQUIRE_FALSE(ask_at({"127.0.0.1", {key.nonce + 1, key.port}}, 0, patient()).has_value());
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(begin_connect("127.0.0.1", key.port));
    REQUIRE(silent.back());
  }
  REQUIRE(has_said(ask_at({"127.0.0.1", key}, 0, patient()), "% of a core."));
  char byte = 0;
  for (const UniqueFd& socket : silent) {  // all are sent away
    REQUIRE(wait_for_socket(socket.get(), POLLIN, patient_context()));
    REQUIRE(::recv(socket.get(), &byte, 1, 0) == 0);
  }
  REQUIRE_FALSE(ask_at({"127.0.0.1", key}, post.number() + 1, patient()).has_value());
}

TEST_CASE("watch door: nobody answers where there is none any more") {
  DoorKey key;
  {
    WatchPost post({});
    key = post.open_door();
  }
  REQUIRE_FALSE(ask_at({"127.0.0.1", key}, 0, patient()).has_value());
}

TEST_CASE("watch door: who does not answer in time is there all the same") {
  std::atomic<bool> may_go{false};
  WatchPost post([&](const Deadline&) {
    while (!may_go) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::string();
  });
  const Door door{"127.0.0.1", post.open_door()};
  for (const Deadline& deadline : {soon(), patient()}) {  // before the door gives up, and after
    const auto answer = ask_at(door, 0, deadline);
    REQUIRE(answer.has_value());
    REQUIRE_FALSE(answer->text.has_value());
    REQUIRE(answer->is_late);
  }
  may_go = true;
}

TEST_CASE("watch post: a forked child has none, and does not disturb its parent's") {
  auto post = std::make_unique<WatchPost>(WatchPost::Tell());
  const std::uint64_t number = post->number();
  const pid_t parent = ::getpid();
  const int status = in_child([&] {
    post.reset();
    const auto answer = ask(number, patient());
    return answer && answer->pid == parent && answer->text ? 0 : 1;
  });
  REQUIRE(status == 0);
  REQUIRE(has_said(ask(number, patient()), "% of a core."));
  post.reset();
  REQUIRE_FALSE(ask(number, patient()).has_value());
}

TEST_CASE("long wait: is in the list while it lasts, from the first second on") {
  const Deadline deadline = patient();
  {
    LongWait wait;
    int n_described = 0;
    const auto look = [&] {
      wait.look(deadline, [&](bool) {
        ++n_described;
        return Waiting{"barrier #3 of a test", {{"rank 1 (pid 101)", 0, ""}}, false};
      });
    };
    look();
    look();
    REQUIRE(describe_long_waits().empty());
    REQUIRE(n_described == 0);
    while (n_described == 0 && !deadline.has_passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      look();
    }
    REQUIRE(describe_long_waits() ==
            "waits in barrier #3 of a test, for rank 1 (pid 101), since 1 s");
    look();
    REQUIRE(n_described == 1);  // not at each look
    const WatchPost post({});
    REQUIRE(has_said(ask(post.number(), patient()), "waits in barrier #3 of a test"));
  }
  REQUIRE(describe_long_waits().empty());
}
