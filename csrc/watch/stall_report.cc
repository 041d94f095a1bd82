#include "watch/stall_report.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/this_host.h"
#include "core/thread_name.h"
#include "watch/watch_door.h"
#include "watch/watch_post.h"

namespace horon {
namespace {

constexpr std::size_t kMostAsked = 4;
constexpr std::size_t kMostFollowed = 4;      // of those that the asked ones wait for, in turn
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

// Whether it is a name of this process: with its host, or without it in what this host says.
bool names(const std::string& text, bool is_of_this_host, const Self& self) {
  const auto has = [&](const std::string& name) {
    const std::size_t at = text.find(name);
    return at != std::string::npos && at > 0 && std::strchr("( ", text[at - 1]) != nullptr;
  };
  return (is_of_this_host && has(concat("pid ", self.pid, ')'))) ||
         has(concat("pid ", self.pid, " on ", self.host, ')'));
}

// Whether an answer says so of a thread that does nothing else.
bool waits_for(const std::string& answer, bool is_of_this_host, const Self& self) {
  std::istringstream lines(answer);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(kWaits) && names(line, is_of_this_host, self)) {
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

Answer ask_where(const LateRank& rank) {
  const Deadline deadline = Deadline::after(kPatience);
  Answer answer = (rank.door ? ask_at(rank.door, rank.post, deadline) : ask(rank.post, deadline))
                      .value_or(Answer());
  if (answer.is_late && rank.state.empty()) {
    answer.text =
        "did not answer when it was asked where it is: it may be stopped, or get no CPU time";
  }
  return answer;
}

// As far as one can tell without asking them.
bool are_same(const LateRank& one, const LateRank& other) {
  if (one.post != 0 || other.post != 0) {
    return one.post == other.post;
  }
  if (one.door || other.door) {
    return one.door.key.nonce == other.door.key.nonce;
  }
  return one.name == other.name;
}

Self this_process() { return {::getpid(), this_host()}; }

}  // namespace

std::string late_text(const std::vector<LateRank>& late,
                      const std::vector<std::optional<std::string>>& answers, bool is_blocking,
                      const Self& self) {
  std::string text;
  for (std::size_t i = 0; i < std::min(late.size(), std::max(answers.size(), kMostAsked)); ++i) {
    const std::optional<std::string> answer = i < answers.size() ? answers[i] : std::nullopt;
    const std::string line = about(late[i], answer);
    if (!line.empty()) {
      text += '\n' + indented(line, "    ");
    }
    if (is_blocking && answer && waits_for(*answer, !late[i].door, self)) {
      text += concat("\n    So it waits for this process (pid ", self.pid,
                     "), and this one for it. Do ",
                     "all ranks call the same operations, of the same groups, in the same order?");
    }
  }
  return text;
}

std::string stall_text(const Waiting& waiting, std::chrono::seconds waited) {
  return concat(waiting.operation, " has waited ", waited.count(), " s for ",
                waiting.late.empty() ? "another rank" : short_list(waiting.late), '.');
}

void follow(std::vector<LateRank>& late, const AskWhere& ask_one, const Self& self,
            std::vector<std::optional<std::string>>* answers) {
  std::set<std::uint64_t> asked;
  if (late.size() > kMostAsked) {
    late.resize(kMostAsked);
  }
  const Deadline begin_until = Deadline::after(kPatience);
  for (std::size_t i = 0; i < late.size() && !begin_until.has_passed(); ++i) {
    Answer answer = ask_one(late[i]);
    if (answer.post != 0 && !asked.insert(answer.post).second) {  // by another way
      late.erase(late.begin() + static_cast<std::ptrdiff_t>(i--));
      continue;
    }
    bool is_followed = false;
    for (LateRank& next : answer.late) {
      const auto is_it = [&](const LateRank& known) { return are_same(known, next); };
      if (late.size() < kMostAsked + kMostFollowed && asked.count(next.post) == 0 &&
          !names(next.name, !late[i].door, self) && std::none_of(late.begin(), late.end(), is_it)) {
        late.push_back(std::move(next));
        is_followed = true;
      }
    }
    if (is_followed && answer.text) {
      answer.text->resize(std::min(answer.text->size(), answer.text->find(kBeyondWaits)));
    }
    answers->push_back(std::move(answer.text));
  }
}

void ask_about(std::vector<LateRank> late, bool is_blocking,
               const std::function<void(const std::string& text)>& use) {
  const auto shared = std::make_shared<std::vector<LateRank>>(std::move(late));
  try {
    quiet_thread([shared, is_blocking, use] {
      name_this_thread("horon-report");
      const Self self = this_process();
      std::vector<std::optional<std::string>> answers;
      follow(*shared, ask_where, self, &answers);
      use(late_text(*shared, answers, is_blocking, self));
    }).detach();
  } catch (const std::system_error&) {  // no more threads: nobody can be asked
    use(late_text(*shared, {}, is_blocking, this_process()));
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
