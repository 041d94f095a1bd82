#include "watch/watch_door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/random_nonce.h"
#include "core/this_host.h"
#include "core/thread_name.h"
#include "core/wait_context.h"
#include "net/tcp_socket.h"
#include "watch/watch_post.h"

namespace horon {
namespace {

constexpr std::uint64_t kDoorMagic = 0x3130726f6f64726e;  // "nrdoor01": changes with the protocol
// In the place of a post: nobody is asked, and only the head of a reply comes.
constexpr std::uint64_t kIsAnybodyThere = ~std::uint64_t{0};
constexpr std::chrono::milliseconds kQuestionPatience{500};
constexpr std::chrono::milliseconds kPostPatience{1500};
constexpr std::chrono::seconds kSaidAgain{1};
constexpr std::chrono::milliseconds kPauseWithoutMemory{100};
constexpr std::size_t kMostGuests = 64;

// Plain data.
struct Question {
  std::uint64_t magic = kDoorMagic;
  std::uint64_t nonce = 0;
  std::uint64_t post = 0;  // 0: that of the process whose door it is
};

struct ReplyHead {
  std::uint64_t magic = kDoorMagic;
  std::uint64_t post = 0;  // 0: that one can not be asked here
  std::uint32_t is_late = 0;
  std::uint32_t bytes = 0;  // that follow
};

bool is_loopback(const std::string& address) {
  return address == "::1" || address.starts_with("127.") || address.starts_with("::ffff:127.");
}

void replace_all(std::string& text, const std::string& what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) {
    text.replace(at, what.size(), by);
  }
}

}  // namespace

// One that has come, and has half a second to ask.
struct WatchDoor::Guest {
  UniqueFd socket;
  Deadline until;
  std::string heard = {};  // of the question
};

WatchDoor::WatchDoor(std::uint64_t post)
    : fork_generation_(fork_generation()), post_(post), stop_(::eventfd(0, EFD_CLOEXEC)) {
  HORON_CHECK(stop_, system_error_text("eventfd", errno));
  key_.nonce = random_nonce();
  listener_ = listen_tcp(&key_.port);
  for (const UniqueFd* fd : {&listener_, &stop_}) {
    guards_.push_back(std::make_unique<ClosedInChild>(fd->get()));
  }
  thread_ = start_thread([this] { serve(); });
}

WatchDoor::~WatchDoor() {
  if (fork_generation_ != fork_generation()) {
    thread_.detach();
    // Both are closed, and their numbers may be somebody else's by now.
    (void)new (std::nothrow) UniqueFd(std::move(listener_));
    (void)new (std::nothrow) UniqueFd(std::move(stop_));
    return;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void WatchDoor::serve() {
  name_this_thread("horon-door");
  std::vector<Guest> guests;
  while (true) {
    std::vector<pollfd> entries = {{stop_.get(), POLLIN, 0},
                                   {guests.size() < kMostGuests ? listener_.get() : -1, POLLIN, 0}};
    auto limit = std::chrono::milliseconds(-1);
    for (const Guest& guest : guests) {
      entries.push_back({guest.socket.get(), POLLIN, 0});
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(guest.until.remaining());
      limit =
          std::max(limit.count() < 0 ? left : std::min(limit, left), std::chrono::milliseconds(0));
    }
    const int ready = ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
    if (ready > 0 && entries[0].revents != 0) {
      return;
    }
    try {
      HORON_CHECK(ready >= 0 || errno == EINTR, system_error_text("poll", errno));
      for (std::size_t i = guests.size(); i-- > 0;) {
        const bool has_something = ready > 0 && entries[i + 2].revents != 0;
        if (has_something ? hear(guests[i]) : guests[i].until.has_passed()) {
          guests.erase(guests.begin() + static_cast<std::ptrdiff_t>(i));
        }
      }
      if (ready > 0 && entries[1].revents != 0) {
        let_in(&guests);
      }
    } catch (const std::exception&) {
      // No descriptor or memory is left: there may be later.
      std::this_thread::sleep_for(kPauseWithoutMemory);
    }
  }
}

void WatchDoor::let_in(std::vector<Guest>* guests) const {
  if (UniqueFd socket = accept_tcp(listener_.get())) {
    guests->push_back({std::move(socket), Deadline::after(kQuestionPatience)});
  }
}

bool WatchDoor::hear(Guest& guest) {
  char bytes[sizeof(Question)];
  const ssize_t received =
      ::recv(guest.socket.get(), bytes, sizeof bytes - guest.heard.size(), MSG_DONTWAIT);
  if (received < 0 && would_block()) {
    return guest.until.has_passed();
  }
  if (received <= 0) {
    return true;
  }
  guest.heard.append(bytes, static_cast<std::size_t>(received));
  if (guest.heard.size() < sizeof(Question)) {
    return guest.until.has_passed();
  }
  try {
    answer(guest);
  } catch (const Error&) {
    return true;  // it has gone meanwhile
  }
  return true;
}

void WatchDoor::answer(const Guest& guest) {
  Question question;
  std::memcpy(&question, guest.heard.data(), sizeof question);
  if (question.magic != kDoorMagic || question.nonce != key_.nonce) {
    return;
  }
  ReplyHead head;
  head.post = question.post == 0 || question.post == kIsAnybodyThere ? post_ : question.post;
  const Said* said = nullptr;
  if (question.post != kIsAnybodyThere) {
    said = what_to_say(head.post);
    head.post = said == nullptr ? 0 : head.post;
  }
  if (said != nullptr) {
    head.is_late = said->is_late ? 1 : 0;
    head.bytes = static_cast<std::uint32_t>(said->message.size());
  }
  const WaitContext sending{Deadline::after(kQuestionPatience), nullptr};
  send_all(guest.socket.get(), &head, sizeof head, sending);
  if (said != nullptr) {
    send_all(guest.socket.get(), said->message.data(), said->message.size(), sending);
  }
}

const WatchDoor::Said* WatchDoor::what_to_say(std::uint64_t post) {
  std::erase_if(said_,
                [](const auto& entry) { return Clock::now() - entry.second.at >= kSaidAgain; });
  if (const auto known = said_.find(post); known != said_.end()) {
    return &known->second;
  }
  std::optional<Answer> heard = ask(post, Deadline::after(kPostPatience));
  if (!heard) {
    return nullptr;
  }
  Said said;
  said.is_late = heard->is_late;
  if (heard->text) {
    Answer answer = for_other_hosts(std::move(*heard), this_host());
    said.message = encode_answer(std::move(answer.text).value_or(""), answer.late);
  }
  said.at = Clock::now();
  return &(said_[post] = std::move(said));
}

Answer for_other_hosts(Answer answer, const std::string& host) {
  for (LateRank& rank : answer.late) {
    if (is_loopback(rank.door.address)) {
      rank.door = {};
    }
    if (rank.name.ends_with(')') && rank.name.find(" on ") == std::string::npos) {
      const std::string name = rank.name;
      rank.name.insert(name.size() - 1, concat(" on ", host));
      if (answer.text) {
        replace_all(*answer.text, name, rank.name);
      }
    }
  }
  return answer;
}

std::optional<Answer> ask_at(const Door& door, std::uint64_t post, const Deadline& deadline) {
  Answer answer;
  try {
    const WaitContext context{deadline, nullptr};
    const UniqueFd socket = begin_connect(door.address, door.key.port);
    if (!socket || !wait_for_socket(socket.get(), POLLOUT, context) ||
        connect_error(socket.get()) != 0) {
      return std::nullopt;
    }
    Question question;
    question.nonce = door.key.nonce;
    question.post = post;
    send_all(socket.get(), &question, sizeof question, context);
    ReplyHead head;
    receive_all(socket.get(), &head, sizeof head, context);
    if (head.magic != kDoorMagic || head.post == 0 || head.bytes > kMostAnswerBytes) {
      return std::nullopt;
    }
    answer.post = head.post;
    answer.is_late = head.is_late != 0;
    if (head.bytes > 0) {
      std::string message(head.bytes, '\0');
      receive_all(socket.get(), message.data(), message.size(), context);
      decode_answer(message, &answer);
    }
  } catch (const TimeoutError&) {
    answer.post = post;
    answer.is_late = true;  // the system took the connection, and nobody came for it
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (LateRank& rank : answer.late) {
    if (!rank.door) {
      rank.door = door;  // its post is of that host
    }
  }
  return answer;
}

std::vector<DoorState> look_at(const std::vector<Door>& doors, const Deadline& deadline) {
  struct Attempt {
    std::size_t index = 0;
    UniqueFd socket;
    bool has_asked = false;
  };
  std::vector<DoorState> states(doors.size(), DoorState::kUnknown);
  std::vector<Attempt> attempts;
  const auto take_error = [&](std::size_t index, int error) {
    states[index] = error == ECONNREFUSED ? DoorState::kRefused : DoorState::kUnknown;
  };
  for (std::size_t i = 0; i < doors.size(); ++i) {
    int error = 0;
    if (UniqueFd socket = begin_connect(doors[i].address, doors[i].key.port, &error)) {
      attempts.push_back({i, std::move(socket)});
    } else {
      take_error(i, error);
    }
  }
  // Whether that is over.
  const auto go_on = [&](Attempt& attempt) {
    const int socket = attempt.socket.get();
    if (!attempt.has_asked) {
      attempt.has_asked = true;
      if (const int error = connect_error(socket); error != 0) {
        take_error(attempt.index, error);
        return true;
      }
      Question question;
      question.nonce = doors[attempt.index].key.nonce;
      question.post = kIsAnybodyThere;
      return ::send(socket, &question, sizeof question, MSG_NOSIGNAL | MSG_DONTWAIT) !=
             sizeof question;
    }
    ReplyHead head;
    const ssize_t received = ::recv(socket, &head, sizeof head, MSG_DONTWAIT);
    if (received == sizeof head && head.magic == kDoorMagic && head.post != 0) {
      states[attempt.index] = DoorState::kOpen;
    }
    return true;
  };
  while (!attempts.empty() && !deadline.has_passed()) {
    std::vector<pollfd> entries;
    entries.reserve(attempts.size());
    for (const Attempt& attempt : attempts) {
      entries.push_back(
          {attempt.socket.get(), static_cast<short>(attempt.has_asked ? POLLIN : POLLOUT), 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    const int ready = ::poll(entries.data(), entries.size(),
                             static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    HORON_CHECK(ready >= 0 || errno == EINTR, system_error_text("poll", errno));
    for (std::size_t i = attempts.size(); ready > 0 && i-- > 0;) {
      if (entries[i].revents != 0 && go_on(attempts[i])) {
        attempts.erase(attempts.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
  return states;
}

}  // namespace horon
