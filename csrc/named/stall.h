// What to say about operations that some ranks have announced and others have not. All pure.
#pragma once

#include <string>
#include <vector>

#include "core/deadline.h"
#include "named/named_request.h"

namespace horon {

struct StalledOperation {
  std::string name;
  NamedKind kind = NamedKind::kAllReduce;
  int process_set = 0;
  std::vector<int> ready;    // ranks that have announced it
  std::vector<int> missing;  // and that have not
  Clock::duration age{};
};

// One operation, as an error: it is given up.
std::string stall_error(const StalledOperation& operation);

// A report of several lines; empty when nothing is stalled.
std::string stall_report(const std::vector<StalledOperation>& operations);

// All that are missing for any of them, in order.
std::vector<int> missing_ranks(const std::vector<StalledOperation>& operations);

}  // namespace horon
