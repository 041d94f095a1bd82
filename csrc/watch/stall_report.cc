#include "watch/stall_report.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/thread_name.h"
#include "watch/watch_post.h"

namespace horon {
namespace {

constexpr std::size_t kMostAsked = 4;
constexpr std::chrono::seconds kPatience{2};  // for each

std::string indented(const std::string& text, const char* margin) {
  std::string result = margin;
  for (const char letter : text) {
    result += letter;
    if (letter == '\n') {
      result += margin;
    }
  }
  return result;
}

// "rank 1 (pid 11), rank 2 (pid 12) and 3 more".
std::string short_list(const std::vector<LateRank>& late) {
  constexpr std::size_t kMostNamed = 8;
  std::string names;
  for (std::size_t i = 0; i < std::min(late.size(), kMostNamed); ++i) {
    names += (names.empty() ? "" : ", ") + late[i].name;
  }
  return late.size() > kMostNamed ? concat(names, " and ", late.size() - kMostNamed, " more")
                                  : names;
}

// Whether an answer says so, in its lines about waits.
bool waits_for(const std::string& answer, pid_t pid) {
  const std::string name = concat("(pid ", pid, ')');
  for (std::size_t begin = 0; answer.compare(begin, kWaits.size(), kWaits) == 0;) {
    const std::size_t end = std::min(answer.find('\n', begin), answer.size());
    if (answer.substr(begin, end - begin).find(name) != std::string::npos) {
      return true;
    }
    begin = std::min(end + 1, answer.size());
  }
  return false;
}

std::string about(const LateRank& rank, const std::optional<std::string>& answer) {
  if (answer) {
    return concat(rank.name, ' ', *answer);
  }
  if (!rank.state.empty()) {
    return concat(rank.name, ' ', rank.state);
  }
  return rank.post == 0 ? std::string()
                        : concat(rank.name, " did not answer when it was asked where it is: it is ",
                                 "stopped, or gets no CPU time");
}

}  // namespace

std::string late_text(const std::vector<LateRank>& late,
                      const std::vector<std::optional<std::string>>& answers, pid_t pid) {
  std::string text;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const std::string line = about(late[i], answers[i]);
    if (!line.empty()) {
      text += '\n' + indented(line, "    ");
    }
    if (answers[i] && waits_for(*answers[i], pid)) {
      text += concat("\n    So it waits for this process (pid ", pid, "), and this one for it: ",
                     "neither comes to what the other is in. Do all ranks call the same ",
                     "operations, of the same groups, in the same order?");
    }
  }
  return text;
}

std::string stall_text(const Waiting& waiting, std::chrono::seconds waited) {
  return concat(
      waiting.operation, " has waited ", waited.count(), " s for ",
      waiting.late.empty()
          ? std::string("another rank")
          : concat(short_list(waiting.late),
                   waiting.late.size() == 1 ? ", which has" : ", which have", " not come to it"),
      '.');
}

void ask_about(std::vector<LateRank> late, std::function<void(const std::string& text)> use) {
  auto errand = [late = std::move(late), use = std::move(use)] {
    std::vector<std::optional<std::string>> answers;
    for (std::size_t i = 0; i < std::min(late.size(), kMostAsked); ++i) {
      const std::optional<Answer> answer = ask(late[i].post, Deadline::after(kPatience));
      answers.push_back(answer ? answer->text : std::nullopt);
    }
    use(late_text(late, answers, ::getpid()));
  };
  try {
    std::thread([errand] {
      name_this_thread("horon-report");
      errand();
    }).detach();
  } catch (const std::system_error&) {  // no more threads: then the wait is for the answers, too
    errand();
  }
}

void StallReports::log(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (!is_over_) {
    has_reported_ = true;
    log_warning(text);
  }
}

bool StallReports::end() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  return has_reported_;
}

void StallReports::report(const std::shared_ptr<StallReports>& reports, const Waiting& waiting,
                          std::chrono::seconds waited) {
  ask_about(waiting.late, [reports, begin = stall_text(waiting, waited)](const std::string& text) {
    reports->log(begin + text);
  });
}

}  // namespace horon
