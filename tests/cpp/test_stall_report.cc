#include "watch/stall_report.h"

#include <future>

#include "catch.h"

using namespace horon;
using std::chrono::seconds;

namespace {

constexpr const char* kCircle = "So it waits for this process";

LateRank late_number(int number) {
  return {"rank " + std::to_string(number) + " (pid " + std::to_string(100 + number) + ")", 0, ""};
}

LateRank that_can_be_asked(int number) {
  LateRank rank = late_number(number);
  rank.post = static_cast<std::uint64_t>(number);
  return rank;
}

}  // namespace

TEST_CASE("stall report: operation, time and who is late") {
  REQUIRE(stall_text({"barrier #3 on rank 0 (barrier())", {late_number(1)}}, seconds(60)) ==
          "barrier #3 on rank 0 (barrier()) has waited 60 s for rank 1 (pid 101).");
  REQUIRE(stall_text({"barrier #3", {late_number(1), late_number(2)}}, seconds(60)) ==
          "barrier #3 has waited 60 s for rank 1 (pid 101), rank 2 (pid 102).");
  REQUIRE(stall_text({"barrier #3", {}}, seconds(5)) ==
          "barrier #3 has waited 5 s for another rank.");
}

TEST_CASE("stall report: many late ranks are not all named") {
  Waiting waiting{"barrier #3", {}};
  for (int number = 1; number <= 100; ++number) {
    waiting.late.push_back(late_number(number));
  }
  const std::string text = stall_text(waiting, seconds(60));
  REQUIRE(text.find("rank 8 (pid 108) and 92 more.") != std::string::npos);
  REQUIRE(text.find("rank 9 (") == std::string::npos);
}

TEST_CASE("stall report: what a late rank says is indented below it") {
  REQUIRE(late_text({late_number(1)}, {"computes.\nIts main thread:\n  f (a.py:1)"}, true,
                    {7, "here"}) ==
          "\n    rank 1 (pid 101) computes.\n    Its main thread:\n      f (a.py:1)");
}

TEST_CASE("stall report: of one that does not answer, what the system says") {
  LateRank stopped = late_number(1);
  REQUIRE(late_text({stopped}, {std::nullopt}, true, {7, "here"}).empty());  // nothing is known
  stopped.state = "is stopped";
  REQUIRE(late_text({stopped}, {std::nullopt}, true, {7, "here"}) ==
          "\n    rank 1 (pid 101) is stopped");
  REQUIRE(late_text({stopped}, {}, true, {7, "here"}) ==
          "\n    rank 1 (pid 101) is stopped");  // not asked
}

TEST_CASE("stall report: two that wait for each other are told so") {
  const std::string waits = "waits in barrier #0, for rank 0 (pid 7), since 60 s. More";
  const auto is_told = [&](const std::string& answer, int pid, bool is_blocking = true) {
    return late_text({late_number(1)}, {answer}, is_blocking, {pid, "here"}).find(kCircle) !=
           std::string::npos;
  };
  REQUIRE(is_told(waits, 7));
  REQUIRE(is_told("waits in a, for rank 5 (pid 77), since 1 s\n" + waits, 7));
  REQUIRE(is_told("waits in a, for rank 5 (global rank 1, pid 7), since 1 s", 7));
  REQUIRE(is_told("waits in a, for rank 5 (pid 7 on here), since 1 s", 7));
  REQUIRE_FALSE(is_told("waits in a, for rank 5 (pid 7 on there), since 1 s", 7));
  LateRank remote = late_number(1);  // where another process may have the same number
  remote.door = {"10.0.0.2", {5, 80}};
  REQUIRE(late_text({remote}, {waits}, true, {7, "here"}).find(kCircle) == std::string::npos);
  REQUIRE(
      late_text({remote}, {"waits in a, for rank 0 (pid 7 on here), since 1 s"}, true, {7, "here"})
          .find(kCircle) != std::string::npos);
  REQUIRE_FALSE(is_told(waits, 77));
  REQUIRE_FALSE(is_told(waits, 70));
  REQUIRE_FALSE(is_told("waits in a, for rank 5 (pid 77)", 7));
  // Who does something else meanwhile may come yet: on either side.
  REQUIRE_FALSE(is_told("waits, beside what else it does, in a, for rank 5 (pid 7)", 7));
  REQUIRE_FALSE(is_told(waits, 7, false));
  // In a stack, say, it means nothing.
  REQUIRE_FALSE(is_told("computes\n  f (pid 7)", 7));
}

TEST_CASE("stall report: those are asked, too, for whom the asked ones wait") {
  // 1 waits for 2, which waits for 1, for 3 and for this process; 3 computes.
  std::vector<int> asked;
  const auto ask_one = [&](const LateRank& rank) {
    asked.push_back(static_cast<int>(rank.post));
    Answer answer;
    answer.post = rank.post;
    answer.text = concat("waits in ", rank.post, kBeyondWaits, "more");
    if (rank.post == 1) {
      answer.late = {that_can_be_asked(2)};
    } else if (rank.post == 2) {
      answer.late = {that_can_be_asked(1), that_can_be_asked(3), {"rank 0 (pid 7)", 4711, ""}};
    }
    return answer;
  };
  std::vector<LateRank> late = {that_can_be_asked(1)};
  std::vector<std::optional<std::string>> answers;
  follow(late, ask_one, {7, "here"}, &answers);
  REQUIRE(asked == std::vector<int>{1, 2, 3});
  REQUIRE(late_text(late, answers, true, {7, "here"}) ==
          "\n    rank 1 (pid 101) waits in 1\n    rank 2 (pid 102) waits in 2"
          "\n    rank 3 (pid 103) waits in 3. Its process uses more");
}

TEST_CASE("stall report: not everybody is asked in a large job") {
  std::vector<LateRank> late;
  for (int rank = 1; rank < 100; ++rank) {
    late.push_back(late_number(rank));
  }
  int n_asked = 0;
  std::vector<std::optional<std::string>> answers;
  const auto ask_one = [&](const LateRank&) {
    Answer answer;
    answer.post = static_cast<std::uint64_t>(1000 + ++n_asked);
    for (int next = 0; next < 10; ++next) {
      answer.late.push_back(late_number(200 + 10 * n_asked + next));
    }
    return answer;
  };
  follow(late, ask_one, {7, "here"}, &answers);
  REQUIRE(n_asked == 8);
  REQUIRE(late.size() == 8);
}

TEST_CASE("stall report: whoever asks does not wait for answers") {
  std::promise<std::string> told;
  ask_about({late_number(1)}, true, [&](const std::string& text) { told.set_value(text); });
  REQUIRE(told.get_future().get().empty());
}

TEST_CASE("stall report: nothing is said of a wait that has ended") {
  const auto reports = std::make_shared<StallReports>();
  REQUIRE_FALSE(reports->end());
  StallReports::report(reports, {"barrier #3, which is over: not to be seen", {}, true},
                       seconds(1));
  std::promise<void> done;  // each errand has a thread: this one may be faster, and tells nothing
  ask_about({}, true, [&](const std::string&) { done.set_value(); });
  done.get_future().wait();
  REQUIRE_FALSE(reports->end());
}
