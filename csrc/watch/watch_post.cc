#include "watch/watch_post.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <new>
#include <thread>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/random_nonce.h"
#include "core/thread_name.h"
#include "core/unix_socket.h"
#include "watch/long_wait.h"

namespace horon {
namespace {

constexpr const char* kName = "horon.watch.";
constexpr std::chrono::milliseconds kLeastSample{100};  // of how much a process computes
constexpr std::chrono::milliseconds kTellPatience{1000};

std::string name_of(std::uint64_t post) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(post));
  return concat(kName, digits);
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Root may ask anybody.
bool may_ask(uid_t asker, uid_t asked) { return asker == asked || asker == 0; }

}  // namespace

WatchPost::WatchPost(Tell tell)
    : fork_generation_(fork_generation()),
      tell_(std::move(tell)),
      number_(std::max<std::uint64_t>(random_nonce(), 1)),
      listener_(listen_on(name_of(number_))),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  HORON_CHECK(stop_, system_error_text("eventfd", errno));
  for (const UniqueFd* fd : {&listener_, &stop_}) {
    guards_.push_back(std::make_unique<ClosedInChild>(fd->get()));
  }
  thread_ = start_thread([this] { serve(); });
}

WatchPost::~WatchPost() {
  if (fork_generation_ != fork_generation()) {
    thread_.detach();
    // Both are closed, and their numbers may be somebody else's by now.
    (void)new (std::nothrow) UniqueFd(std::move(listener_));
    (void)new (std::nothrow) UniqueFd(std::move(stop_));
    return;
  }
  door_.reset();
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

DoorKey WatchPost::open_door() {
  const std::lock_guard lock(door_mutex_);
  if (!door_) {
    door_ = std::make_unique<WatchDoor>(number_);
  }
  return door_->key();
}

void WatchPost::serve() {
  name_this_thread("horon-watch");
  while (true) {
    pollfd entries[] = {{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    const int ready = ::poll(entries, 2, -1);
    if (ready > 0 && entries[1].revents != 0) {
      return;
    }
    if (ready < 0 && errno != EINTR) {
      std::this_thread::sleep_for(kLeastSample);  // no memory is left: there may be later
    }
    if (ready <= 0) {
      continue;
    }
    try {
      let_in();
    } catch (const std::exception&) {
      std::this_thread::sleep_for(
          kLeastSample);  // no descriptor or memory is left: there may be later
    }
  }
}

void WatchPost::let_in() const {
  const UniqueFd socket = accept_until(listener_.get(), Deadline::after(kLeastSample));
  if (socket && may_ask(peer_credentials(socket.get()).uid, ::getuid())) {
    const std::string message = tell();
    // Whoever has gone meanwhile does not get it.
    (void)::send(socket.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

std::string WatchPost::tell() const {
  const Clock::time_point began = Clock::now();
  const double cpu_before = cpu_seconds();
  const std::string waits = describe_long_waits();
  const std::string told = tell_ ? tell_(Deadline::after(kTellPatience)) : std::string();
  std::this_thread::sleep_until(began + kLeastSample);
  const std::chrono::duration<double> sample = Clock::now() - began;
  return encode_answer(answer_text(waits, (cpu_seconds() - cpu_before) / sample.count(), told),
                       late_in_long_waits());
}

std::optional<Answer> ask(std::uint64_t post, const Deadline& deadline) {
  if (post == 0) {
    return std::nullopt;
  }
  try {
    const UniqueFd socket = connect_until(name_of(post), deadline);
    if (!socket) {
      return std::nullopt;
    }
    const ucred process = peer_credentials(socket.get());
    if (!may_ask(::getuid(), process.uid)) {
      return std::nullopt;
    }
    Answer answer;
    answer.pid = process.pid;
    answer.post = post;
    answer.is_late = !has_message(socket.get(), deadline);
    if (!answer.is_late) {
      std::string text(kMostAnswerBytes, '\0');
      const ssize_t received = ::recv(socket.get(), text.data(), text.size(), MSG_DONTWAIT);
      if (received > 0) {
        text.resize(static_cast<std::size_t>(received));
        decode_answer(text, &answer);
      }
    }
    return answer;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::vector<std::uint64_t> find_watch_posts() {
  std::vector<std::uint64_t> posts;
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const auto at = line.find(concat('@', kName));
    if (at == std::string::npos) {
      continue;
    }
    const char* digits = line.data() + at + 1 + std::char_traits<char>::length(kName);
    std::uint64_t post = 0;
    const auto [rest, error] = std::from_chars(digits, line.data() + line.size(), post, 16);
    if (error == std::errc() && rest == line.data() + line.size() &&
        std::find(posts.begin(), posts.end(), post) == posts.end()) {
      posts.push_back(post);  // connections have the listener's name as well
    }
  }
  return posts;
}

}  // namespace horon
