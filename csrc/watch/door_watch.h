// Which processes on other hosts have ended, as far as their doors tell.
//
// A connection of a group that closes says little: its process may have given up the group, and
// live. The door (watch_door.h) stays open as long as the process lives. So a door behind which
// somebody knew the nonce, and that now refuses connections twice, belongs to one that has ended.
// One that does not answer at all says nothing: the host may be gone, or the network between.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/watch_door.h"

namespace horon {

// Thread safety: all methods.
class DoorWatch {
 public:
  struct Neighbour {
    int rank = 0;
    Door door;
    std::string description = {};  // "rank 1 (pid 123 on host-b)"
  };

  // Doors that are none say nothing.
  explicit DoorWatch(std::vector<Neighbour> neighbours);

  // Tries all doors: only those that can be reached say anything later. Blocks until all have
  // answered, at most until the deadline.
  void reach(const Deadline& deadline);

  // The ranks whose processes have ended. Looks at most four times a second, and blocks for a fifth
  // of a second at most where some do not answer.
  std::vector<int> ended();

  // The same of these only; and who they are.
  std::vector<Neighbour> ended_of(const std::vector<int>& ranks);

  // Of these, those about whom it can say something.
  std::vector<int> known_of(const std::vector<int>& ranks) const;

 private:
  struct Entry {
    Neighbour neighbour;
    bool is_known = false;
    int n_refusals = 0;  // one after the other
  };

  bool has_ended(const Entry& entry) const;
  template <typename IsWanted, typename Take>
  void look(const IsWanted& is_wanted, const Deadline& deadline, const Take& take);
  template <typename IsWanted>
  std::vector<Neighbour> ended_where(const IsWanted& is_wanted);

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;     // guarded by mutex_
  Clock::time_point next_look_{};  // guarded by mutex_
};

}  // namespace horon
