#include "cross/coordinator_meeting.h"

#include <numeric>

#include "core/error.h"

namespace horon {

std::vector<RemotePeer> meet_coordinator(Store& store, int rank, int n_ranks,
                                         const std::string& interfaces, const WaitContext& context,
                                         const DoorKey& own_door) {
  // Keys are never used twice: each rank counts its own meetings.
  const std::int64_t generation = store.add(concat("horon/meeting/", rank), 1);
  const std::string key = concat("horon/meeting/", generation, "/coordinator");
  if (rank == 0) {
    Listener listener;
    try {
      listener = listen_for_peers(interfaces);
    } catch (const Error& error) {
      store.set(key, failed_place(error.what()));  // or the others would wait for the deadline
      throw;
    }
    store.set(key, listener.place.encode());
    std::vector<int> numbers(static_cast<std::size_t>(n_ranks));
    std::iota(numbers.begin(), numbers.end(), 0);
    return receive_peers(listener, {0, 0, 0, own_door}, numbers, 1, context);
  }
  const Place place = Place::decode(store.get(key, context.deadline), 0);
  std::vector<RemotePeer> peers;
  peers.push_back(reach(place, 0, 0, {rank, rank, 0, own_door}, context));
  return peers;
}

}  // namespace horon
