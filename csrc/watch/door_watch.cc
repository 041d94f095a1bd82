#include "watch/door_watch.h"

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

std::vector<int> DoorWatch::ended() {
  const std::lock_guard lock(mutex_);
  if (Clock::now() >= next_look_) {
    look([&](const Entry& entry) { return entry.is_known && !has_ended(entry); },
         Deadline::after(kLookPatience),
         [](Entry& entry, DoorState state) {
           entry.n_refusals = state == DoorState::kRefused ? entry.n_refusals + 1 : 0;
         });
    next_look_ = Clock::now() + kBetweenLooks;
  }
  std::vector<int> ranks;
  for (const Entry& entry : entries_) {
    if (has_ended(entry)) {
      ranks.push_back(entry.neighbour.rank);
    }
  }
  return ranks;
}

}  // namespace horon
