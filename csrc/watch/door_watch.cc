#include "watch/door_watch.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/unique_fd.h"
#include "net/tcp_socket.h"

namespace horon {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{500};
constexpr std::chrono::milliseconds kDoorPatience{200};

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
  look(State::kUnknown, deadline);
}

std::vector<int> DoorWatch::ended() {
  const std::lock_guard lock(mutex_);
  if (Clock::now() >= next_look_) {
    look(State::kReached, Deadline::after(kDoorPatience));
    next_look_ = Clock::now() + kBetweenLooks;
  }
  std::vector<int> ranks;
  for (const Entry& entry : entries_) {
    if (entry.state == State::kEnded) {
      ranks.push_back(entry.neighbour.rank);
    }
  }
  return ranks;
}

// Tries the doors in that state. What they say leads from there to another one, or nowhere.
void DoorWatch::look(State from, const Deadline& deadline) {
  struct Attempt {
    Entry* entry;
    UniqueFd socket;
  };
  std::vector<Attempt> attempts;
  const auto settle = [&](Entry& entry, int error) {
    if (from == State::kUnknown && error == 0) {
      entry.state = State::kReached;
    } else if (from == State::kReached && error == ECONNREFUSED) {
      entry.state = State::kEnded;
    }
  };
  for (Entry& entry : entries_) {
    if (entry.state != from) {
      continue;
    }
    const Door& door = entry.neighbour.door;
    int error = 0;
    if (UniqueFd socket = begin_connect(door.address, door.key.port, &error)) {
      attempts.push_back({&entry, std::move(socket)});
    } else {
      settle(entry, error);
    }
  }
  while (!attempts.empty()) {
    std::vector<pollfd> polled;
    polled.reserve(attempts.size());
    for (const Attempt& attempt : attempts) {
      polled.push_back({attempt.socket.get(), POLLOUT, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    const int ready =
        left.count() <= 0
            ? 0
            : ::poll(polled.data(), polled.size(),
                     static_cast<int>(std::min<std::int64_t>(left.count(), kDoorPatience.count())));
    if (ready <= 0 && (deadline.has_passed() || (ready < 0 && errno != EINTR))) {
      return;
    }
    for (std::size_t i = attempts.size(); ready > 0 && i-- > 0;) {
      if (polled[i].revents != 0) {
        settle(*attempts[i].entry, connect_error(attempts[i].socket.get()));
        attempts.erase(attempts.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
}

}  // namespace horon
