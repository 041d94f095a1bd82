#include "cross/full_meeting.h"

#include <utility>

#include "core/error.h"
#include "core/prefixed_store.h"

namespace horon {

std::vector<RemotePeer> meet_everybody(Store& store, int rank, const std::vector<int>& numbers,
                                       const std::string& interfaces, const WaitContext& context) {
  const int n_ranks = static_cast<int>(numbers.size());
  std::vector<RemotePeer> peers;
  for (int first = 0; first <= rank && first < n_ranks - 1; ++first) {
    PrefixedStore part(concat("everybody/", first, '/'), store);
    const std::vector<int> others(numbers.begin() + first, numbers.end());
    for (RemotePeer& peer :
         meet_coordinator(part, rank - first, n_ranks - first, interfaces, context, others)) {
      peer.rank += first;
      peers.push_back(std::move(peer));
    }
  }
  return peers;
}

}  // namespace horon
