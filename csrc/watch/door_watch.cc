#include "watch/door_watch.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/unique_fd.h"
#include "net/tcp_socket.h"
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

void DoorWatch::reach(const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  std::vector<Door> doors;
  doors.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    doors.push_back(entry.neighbour.door);
  }
  const std::vector<bool> open = are_open(doors, deadline);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].is_known = open[i];
  }
}

bool DoorWatch::has_ended(const Entry& entry) const { return entry.n_refusals >= kRefusals; }

std::vector<int> DoorWatch::ended() {
  const std::lock_guard lock(mutex_);
  if (Clock::now() >= next_look_) {
    look(Deadline::after(kLookPatience));
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

void DoorWatch::look(const Deadline& deadline) {
  struct Attempt {
    Entry* entry;
    UniqueFd socket;
  };
  std::vector<Attempt> attempts;
  const auto take = [](Entry& entry, int error) {
    entry.n_refusals = error == ECONNREFUSED ? entry.n_refusals + 1 : 0;
  };
  for (Entry& entry : entries_) {
    if (!entry.is_known || has_ended(entry)) {
      continue;
    }
    const Door& door = entry.neighbour.door;
    int error = 0;
    if (UniqueFd socket = begin_connect(door.address, door.key.port, &error)) {
      attempts.push_back({&entry, std::move(socket)});
    } else {
      take(entry, error);
    }
  }
  while (!attempts.empty()) {
    std::vector<pollfd> polled;
    polled.reserve(attempts.size());
    for (const Attempt& attempt : attempts) {
      polled.push_back({attempt.socket.get(), POLLOUT, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    const int ready = left.count() <= 0
                          ? 0
                          : ::poll(polled.data(), polled.size(), static_cast<int>(left.count()));
    if (ready <= 0 && (deadline.has_passed() || (ready < 0 && errno != EINTR))) {
      return;
    }
    for (std::size_t i = attempts.size(); ready > 0 && i-- > 0;) {
      if (polled[i].revents != 0) {
        take(*attempts[i].entry, connect_error(attempts[i].socket.get()));
        attempts.erase(attempts.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
}

}  // namespace horon
