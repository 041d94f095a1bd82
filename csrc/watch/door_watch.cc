#include "watch/door_watch.h"

#include <algorithm>
#include <utility>

#include "watch/watch_door.h"

namespace horon {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{250};
constexpr std::chrono::milliseconds kLookPatience{200};
constexpr int kRefusals = 2;  // a firewall that is loaded anew may refuse once

}  // namespace

DoorWatch::DoorWatch(std::vector<Neighbour> neighbours) {
  for (Neighbour& neighbour : neighbours) {
    if (neighbour.door) {
      entries_.push_back({std::move(neighbour)});
    }
  }
}

// Looks at the doors of those that are wanted.
template <typename IsWanted, typename Take>
void DoorWatch::look(const IsWanted& is_wanted, const Deadline& deadline, const Take& take) {
  std::vector<Entry*> wanted;
  std::vector<Door> doors;
  for (Entry& entry : entries_) {
    if (is_wanted(entry)) {
      wanted.push_back(&entry);
      doors.push_back(entry.neighbour.door);
    }
  }
  const std::vector<DoorState> states = look_at(doors, deadline);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    take(*wanted[i], states[i]);
  }
}

void DoorWatch::reach(const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  look([](const Entry&) { return true; }, deadline,
       [](Entry& entry, DoorState state) { entry.is_known = state == DoorState::kOpen; });
}

bool DoorWatch::has_ended(const Entry& entry) const { return entry.n_refusals >= kRefusals; }

// Those of the wanted ones that have ended.
template <typename IsWanted>
std::vector<DoorWatch::Neighbour> DoorWatch::ended_where(const IsWanted& is_wanted) {
  const std::lock_guard lock(mutex_);
  if (Clock::now() >= next_look_) {
    look(
        [&](const Entry& entry) {
          return entry.is_known && !has_ended(entry) && is_wanted(entry.neighbour.rank);
        },
        Deadline::after(kLookPatience),
        [](Entry& entry, DoorState state) {
          entry.n_refusals = state == DoorState::kRefused ? entry.n_refusals + 1 : 0;
        });
    next_look_ = Clock::now() + kBetweenLooks;
  }
  std::vector<Neighbour> found;
  for (const Entry& entry : entries_) {
    if (has_ended(entry) && is_wanted(entry.neighbour.rank)) {
      found.push_back(entry.neighbour);
    }
  }
  return found;
}

std::vector<int> DoorWatch::ended() {
  std::vector<int> ranks;
  for (const Neighbour& neighbour : ended_where([](int) { return true; })) {
    ranks.push_back(neighbour.rank);
  }
  return ranks;
}

std::vector<DoorWatch::Neighbour> DoorWatch::ended_of(const std::vector<int>& ranks) {
  return ended_where(
      [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); });
}

std::vector<int> DoorWatch::known_of(const std::vector<int>& ranks) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> known;
  for (const Entry& entry : entries_) {
    if (entry.is_known &&
        std::find(ranks.begin(), ranks.end(), entry.neighbour.rank) != ranks.end()) {
      known.push_back(entry.neighbour.rank);
    }
  }
  return known;
}

}  // namespace horon
