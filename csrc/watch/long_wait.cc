#include "watch/long_wait.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "core/environment.h"
#include "core/error.h"
#include "core/log.h"
#include "core/of_this_process.h"
#include "watch/stall_report.h"
#include "watch/stall_schedule.h"

namespace horon {
namespace {

constexpr std::chrono::seconds kLong{1};  // also how old the list may be
constexpr std::chrono::seconds kStallCheck{60};
constexpr std::string_view kWaitsBeside = "waits, beside what else it does, in ";

struct Listed {
  std::string text;
  Clock::time_point since;
  std::vector<LateRank> late;  // if it is a caller that waits
};

struct WaitList {
  const std::uint32_t fork_generation = horon::fork_generation();
  std::mutex mutex;
  std::uint64_t last = 0;                 // guarded by mutex
  std::map<std::uint64_t, Listed> waits;  // guarded by mutex
};

WaitList& wait_list() {
  static std::atomic<WaitList*> current{nullptr};
  return of_this_process(current, [] { return new WaitList; });
}

std::string all_names(const std::vector<LateRank>& late) {
  std::string names;
  for (const LateRank& rank : late) {
    names += (names.empty() ? "" : ", ") + rank.name;
  }
  return names.empty() ? "another rank" : names;
}

std::chrono::seconds seconds_since(Clock::time_point since) {
  return std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - since);
}

// What is wrong with the environment is an error when a group is made, not here.
std::chrono::seconds stall_interval() {
  static const std::chrono::seconds interval = [] {
    try {
      return stall_check_from_environment().value_or(kStallCheck);
    } catch (const Error&) {
      return kStallCheck;
    }
  }();
  return interval;
}

}  // namespace

struct LongWait::Told {
  std::uint64_t entry = 0;  // in the list
  Clock::time_point next_update{};
  StallSchedule schedule{stall_interval()};
  std::string operation;  // that was reported last
  std::shared_ptr<StallReports> reports = std::make_shared<StallReports>();
};

void LongWait::look(const Deadline& deadline, FunctionRef<Waiting(bool is_report)> describe) {
  const Clock::time_point now = Clock::now();
  if (since_ == Clock::time_point{}) {
    since_ = now;
    return;
  }
  if (now - since_ < kLong) {
    return;
  }
  WaitList& list = wait_list();
  if (told_ == nullptr) {
    told_ = new Told;
    const std::lock_guard lock(list.mutex);
    told_->entry = ++list.last;
  }
  const bool is_due = told_->schedule.is_due(now - since_, deadline.remaining());
  if (!is_due && now < told_->next_update) {
    return;
  }
  const Waiting waiting = describe(is_due);
  told_->next_update = now + kLong;
  {
    const std::lock_guard lock(list.mutex);
    list.waits[told_->entry] = {concat(waiting.is_blocking ? kWaits : kWaitsBeside,
                                       waiting.operation, ", for ", all_names(waiting.late)),
                                since_,
                                {}};
    if (waiting.is_blocking) {
      list.waits[told_->entry].late = waiting.late;
    }
  }
  if (is_due && waiting.reports) {
    told_->operation = waiting.operation;
    StallReports::report(told_->reports, waiting, seconds_since(since_));
  }
}

void LongWait::say_end() {
  if (told_->reports->end()) {
    log_warning(concat(told_->operation, " goes on after ", seconds_since(since_).count(), " s."));
  }
}

void LongWait::end() {
  const std::unique_ptr<Told> told(told_);
  told->reports->end();
  WaitList& list = wait_list();
  const std::lock_guard lock(list.mutex);
  list.waits.erase(told->entry);
}

std::string describe_long_waits() {
  WaitList& list = wait_list();
  const std::lock_guard lock(list.mutex);
  std::string text;
  for (const auto& [entry, wait] : list.waits) {
    text += concat(text.empty() ? "" : "\n", wait.text, ", since ",
                   seconds_since(wait.since).count(), " s");
  }
  return text;
}

std::vector<LateRank> late_in_long_waits() {
  WaitList& list = wait_list();
  const std::lock_guard lock(list.mutex);
  std::vector<LateRank> late;
  for (const auto& [entry, wait] : list.waits) {
    late.insert(late.end(), wait.late.begin(), wait.late.end());
  }
  return late;
}

}  // namespace horon
