// A wait for other ranks, in case it lasts.
//
// Note [Long waits]
// Whoever waits looks around every 50 ms or so in any case, for deaths and signals, and tells a
// LongWait then. Nothing is done in the first second. After that the wait stands in a list of this
// process, for those that ask it where it is (watch_post.h). When it is worth a word
// (stall_schedule.h) a thread of its own asks the late ranks the same, and writes a report: nobody
// waits for the answers, and what was waited for is noticed as soon as ever.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "core/function_ref.h"
#include "core/late_rank.h"

namespace horon {

// What is waited for.
struct Waiting {
  std::string operation;       // "all_reduce #7 on rank 0 (...)"
  std::vector<LateRank> late;  // empty: it is not known who
  bool reports = true;         // this rank and not another one that waits, too
  bool is_blocking = true;     // a caller's thread waits, which does nothing else meanwhile
};

// Thread safety: none; it belongs to the thread that waits.
class LongWait {
 public:
  LongWait() = default;
  ~LongWait() {
    if (told_ != nullptr) {
      end();
    }
  }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // Called now and then while it lasts. `describe(is_report)` is called only when something is to
  // be told: each second, and for a report.
  void look(const Deadline& deadline, FunctionRef<Waiting(bool is_report)> describe);
  // It counts from now on instead of from the first look.
  void begin() { since_ = Clock::now(); }
  // It has ended well, which is said if it was reported.
  void go_on() {
    if (told_ != nullptr) {
      say_end();
    }
  }

 private:
  struct Told;
  void end();
  void say_end();

  Clock::time_point since_{};
  Told* told_ = nullptr;  // owned; from the second second on. Most waits never get one.
};

// How lines of describe_long_waits() begin, of threads that do nothing else.
inline constexpr std::string_view kWaits = "waits in ";

// What threads of this process have waited for, for a second at least, a line each.
std::string describe_long_waits();

// For whom these wait, of those that do nothing else.
std::vector<LateRank> late_in_long_waits();

}  // namespace horon
