#include "named/stall.h"

#include <set>

#include "core/error.h"
#include "core/rank_list.h"

namespace horon {
namespace {

constexpr std::size_t kShownOperations = 20;

std::int64_t seconds(Clock::duration age) {
  return std::chrono::duration_cast<std::chrono::seconds>(age).count();
}

std::string set_text(int process_set) {
  return process_set == 0 ? std::string() : concat(" in process set ", process_set);
}

}  // namespace

std::vector<int> missing_ranks(const std::vector<StalledOperation>& operations) {
  std::set<int> missing;
  for (const StalledOperation& operation : operations) {
    missing.insert(operation.missing.begin(), operation.missing.end());
  }
  return {missing.begin(), missing.end()};
}

std::string stall_error(const StalledOperation& operation) {
  return concat(name(operation.kind), " '", operation.name, "'", set_text(operation.process_set),
                " was given up after ", seconds(operation.age), " s: ", name_ranks(operation.ready),
                " announced it, ", name_ranks(operation.missing),
                " did not. (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)");
}

std::string stall_report(const std::vector<StalledOperation>& operations) {
  if (operations.empty()) {
    return {};
  }
  std::string text = concat(
      "One or more tensors were announced by some ranks and not by others, which now wait for ",
      "them. Either a rank is late, or ranks ask for different operations. Stalled:");
  std::size_t shown = 0;
  for (const StalledOperation& operation : operations) {
    if (shown++ == kShownOperations) {
      text += concat("\n  and ", operations.size() - kShownOperations, " more");
      break;
    }
    text += concat("\n  ", name(operation.kind), " '", operation.name, "'",
                   set_text(operation.process_set), ": announced by ", name_ranks(operation.ready),
                   "; missing: ", name_ranks(operation.missing), "; for ", seconds(operation.age),
                   " s");
  }
  return text;
}

}  // namespace horon
