#include "watch/stall_report.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>
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

// Whether an answer says so of a thread that does nothing else.
bool waits_for(const std::string& answer, pid_t pid) {
  const std::string name = concat("pid ", pid, ')');
  std::istringstream lines(answer);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.starts_with(kWaits) ? line.find(name) : std::string::npos;
    if (at != std::string::npos && std::strchr("( ", line[at - 1]) != nullptr) {
      return true;
    }
  }
  return false;
}

// Nothing where nothing is known.
std::string about(const LateRank& rank, const std::optional<std::string>& answer) {
  if (answer) {
    return concat(rank.name, ' ', *answer);
  }
  return rank.state.empty() ? std::string() : concat(rank.name, ' ', rank.state);
}

std::optional<std::string> ask_where(const LateRank& rank) {
  const std::optional<Answer> answer = ask(rank.post, Deadline::after(kPatience));
  if (answer && answer->is_late && rank.state.empty()) {
    return "did not answer when it was asked where it is: it is stopped, or gets no CPU time";
  }
  return answer ? answer->text : std::nullopt;
}

}  // namespace

std::string late_text(const std::vector<LateRank>& late,
                      const std::vector<std::optional<std::string>>& answers, bool is_blocking,
                      pid_t pid) {
  std::string text;
  for (std::size_t i = 0; i < std::min(late.size(), kMostAsked); ++i) {
    const std::optional<std::string> answer = i < answers.size() ? answers[i] : std::nullopt;
    const std::string line = about(late[i], answer);
    if (!line.empty()) {
      text += '\n' + indented(line, "    ");
    }
    if (is_blocking && answer && waits_for(*answer, pid)) {
      text += concat("\n    So it waits for this process (pid ", pid, "), and this one for it. Do ",
                     "all ranks call the same operations, of the same groups, in the same order?");
    }
  }
  return text;
}

std::string stall_text(const Waiting& waiting, std::chrono::seconds waited) {
  return concat(waiting.operation, " has waited ", waited.count(), " s for ",
                waiting.late.empty() ? "another rank" : short_list(waiting.late), '.');
}

void ask_about(std::vector<LateRank> late, bool is_blocking,
               const std::function<void(const std::string& text)>& use) {
  const auto shared = std::make_shared<const std::vector<LateRank>>(std::move(late));
  try {
    quiet_thread([shared, is_blocking, use] {
      name_this_thread("horon-report");
      std::vector<std::optional<std::string>> answers;
      for (std::size_t i = 0; i < std::min(shared->size(), kMostAsked); ++i) {
        answers.push_back(ask_where((*shared)[i]));
      }
      use(late_text(*shared, answers, is_blocking, ::getpid()));
    }).detach();
  } catch (const std::system_error&) {  // no more threads: nobody can be asked
    use(late_text(*shared, {}, is_blocking, ::getpid()));
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
  ask_about(waiting.late, waiting.is_blocking,
            [reports, begin = stall_text(waiting, waited)](const std::string& text) {
              reports->log(begin + text);
            });
}

}  // namespace horon
