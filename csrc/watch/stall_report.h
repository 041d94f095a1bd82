// What is said about a wait that lasts.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "watch/answer.h"
#include "watch/long_wait.h"

namespace horon {

// One line. Pure.
std::string stall_text(const Waiting& waiting, std::chrono::seconds waited);

// This process, as others may call it.
struct Self {
  pid_t pid = 0;
  std::string host;
};

// What is known of the late ranks: nothing, or indented lines, each after a line's end. `answers`:
// what their processes said, of the first of them, in order; nothing of one that did not answer.
// `self`: to tell whether one of them waits for this process, if this one does nothing else
// (`is_blocking`). Pure.
std::string late_text(const std::vector<LateRank>& late,
                      const std::vector<std::optional<std::string>>& answers, bool is_blocking,
                      const Self& self);

// Asks the first few of the late ranks where they are, and then those that they wait for in turn,
// which are added to `late`: each process once, and not this one. `answers`: as late_text() has it;
// of one that waits for another one that was asked, only that.
using AskWhere = std::function<Answer(const LateRank&)>;
void follow(std::vector<LateRank>& late, const AskWhere& ask_one, const Self& self,
            std::vector<std::optional<std::string>>* answers);

// Asks the ranks as follow() does, and calls `use` with what late_text() makes of that, on a thread
// that nobody waits for. Where the system gives no thread nobody is asked.
void ask_about(std::vector<LateRank> late, bool is_blocking,
               const std::function<void(const std::string& text)>& use);

// What is told of one wait, by several threads.
class StallReports {
 public:
  // Asks the late ranks (the first few, if they are many) where they are, and logs a report, unless
  // the wait has ended by then. Does not wait for that.
  static void report(const std::shared_ptr<StallReports>& reports, const Waiting& waiting,
                     std::chrono::seconds waited);

  // The wait is over. Whether anything was reported.
  bool end();

 private:
  void log(const std::string& text);

  std::mutex mutex_;
  bool is_over_ = false;       // guarded by mutex_
  bool has_reported_ = false;  // guarded by mutex_
};

}  // namespace horon
