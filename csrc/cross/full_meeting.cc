#include "cross/full_meeting.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace horon {
namespace {

// Where every rank listens, by rank.
std::vector<std::string> exchange_places(Store& store, int rank, const std::vector<int>& numbers,
                                         const std::string& own, const WaitContext& context) {
  // Keys are never used twice: each rank counts its own meetings.
  const std::int64_t generation = store.add(concat("horon/everybody/", rank), 1);
  const auto key = [&](const auto& what) {
    return concat("horon/everybody/", generation, '/', what);
  };
  std::vector<std::string> places(numbers.size());
  if (rank != 0) {
    store.set(key(rank), own);
    std::istringstream lines(store.get(key("all"), context.deadline));
    for (std::string& place : places) {
      std::getline(lines, place);
    }
    return places;
  }
  std::string all;
  places[0] = own;
  for (std::size_t peer = 0; peer < places.size(); ++peer) {
    if (peer > 0) {
      try {
        places[peer] = store.get(key(peer), context.deadline);
      } catch (const TimeoutError&) {
        throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(),
                                  "ms for the address of rank ", numbers[peer]));
      }
    }
    all += concat(places[peer], '\n');
  }
  store.set(key("all"), all);
  return places;
}

}  // namespace

std::vector<std::vector<RemotePeer>> meet_everybody(Store& store, int rank,
                                                    const std::vector<int>& numbers, int n_streams,
                                                    const std::string& interfaces,
                                                    const WaitContext& context,
                                                    const DoorKey& own_door) {
  std::vector<std::vector<RemotePeer>> streams(static_cast<std::size_t>(n_streams));
  Introduction own{rank, numbers[static_cast<std::size_t>(rank)], 0, own_door};
  const std::size_t n_listeners = numbers.size() - 1;  // nobody connects to the last rank
  Listener listener;
  std::string own_place = "none";
  try {
    if (static_cast<std::size_t>(rank) < n_listeners) {
      listener = listen_for_peers(interfaces);
      own_place = listener.place.encode();
    }
  } catch (const Error& error) {
    own_place = failed_place(error.what());  // all others hear of it
    std::replace(own_place.begin(), own_place.end(), '\n', ' ');
  }
  const std::vector<std::string> texts = exchange_places(store, rank, numbers, own_place, context);
  std::vector<Place> places;
  places.reserve(n_listeners);
  for (std::size_t peer = 0; peer < n_listeners; ++peer) {
    places.push_back(Place::decode(texts[peer], numbers[peer]));
  }
  for (int peer = 0; peer < rank; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    for (own.stream = 0; own.stream < n_streams; ++own.stream) {
      streams[static_cast<std::size_t>(own.stream)].push_back(
          reach(places[index], peer, numbers[index], own, context));
    }
  }
  own.stream = 0;
  for (RemotePeer& peer : receive_peers(listener, own, numbers, n_streams, context)) {
    streams[static_cast<std::size_t>(peer.stream)].push_back(std::move(peer));
  }
  return streams;
}

}  // namespace horon
