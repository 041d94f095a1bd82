#include "core/monitored_barrier.h"

#include "core/error.h"

namespace horon {

std::chrono::milliseconds monitored_barrier_timeout(std::chrono::milliseconds timeout, int rank) {
  return rank == 0 ? timeout : timeout + kGraceForRankZero;
}

std::string monitored_barrier_timeout_text(const std::vector<int>& missing, bool all_ranks,
                                           std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    return "Rank 0 timed out in monitoredBarrier after 0 ms.";
  }
  if (!all_ranks || missing.size() == 1) {
    const std::string hint =
        all_ranks ? "" : " Pass wait_all_ranks=True to hear of all ranks that are missing.";
    return concat("[Rank 0]: Rank ", missing.empty() ? 0 : missing[0],
                  " failed to pass monitoredBarrier in ", timeout.count(), " ms.", hint);
  }
  std::string ranks;
  for (const int rank : missing) {
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return concat("[Rank 0]: Ranks ", ranks, " failed to pass monitoredBarrier in ", timeout.count(),
                " ms.");
}

std::string monitored_barrier_refused_text(int rank, const std::string& reason) {
  return concat("Rank ", rank, " successfully reached monitoredBarrier, but received errors while",
                " waiting for send/recv from rank 0: ", reason);
}

}  // namespace horon
