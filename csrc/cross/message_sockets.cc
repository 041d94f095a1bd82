#include "cross/message_sockets.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/thread_name.h"
#include "net/tcp_socket.h"

namespace horon {
namespace {

constexpr std::uint64_t kReadyEvent = 0;
constexpr std::uint64_t kStopEvent = 1;
constexpr int kMostEvents = 64;

UniqueFd make_epoll() {
  UniqueFd fd(::epoll_create1(EPOLL_CLOEXEC));
  HORON_CHECK(fd, system_error_text("epoll_create1", errno));
  return fd;
}

}  // namespace

MessageSockets::MessageSockets(int n_ranks, std::vector<RemotePeer> peers,
                               std::function<void()> ring)
    : by_rank_(static_cast<std::size_t>(n_ranks)),
      wants_room_(static_cast<std::size_t>(n_ranks), false),
      is_watched_(static_cast<std::size_t>(n_ranks), false),
      ring_(std::move(ring)),
      ready_(make_epoll()),
      armed_(make_epoll()),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  HORON_CHECK(stop_, system_error_text("eventfd", errno));
  for (const UniqueFd* fd : {&ready_, &armed_, &stop_}) {
    guards_.push_back(std::make_unique<ClosedInChild>(fd->get()));
  }
  const auto add = [&](int fd, std::uint32_t events, std::uint64_t which) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = which;
    HORON_CHECK(::epoll_ctl(armed_.get(), EPOLL_CTL_ADD, fd, &event) == 0,
                system_error_text("epoll_ctl", errno));
  };
  add(stop_.get(), EPOLLIN, kStopEvent);
  add(ready_.get(), EPOLLONESHOT, kReadyEvent);  // not armed
  for (RemotePeer& peer : peers) {
    auto& socket = by_rank_[static_cast<std::size_t>(peer.rank)];
    socket = std::make_unique<MessageSocket>(std::move(peer));
    want(EPOLL_CTL_ADD, *socket, false);
    is_watched_[static_cast<std::size_t>(socket->rank())] = true;
  }
}

MessageSockets::~MessageSockets() {
  if (thread_.joinable()) {  // a forked child's: stop() was called otherwise
    thread_.detach();
  }
}

void MessageSockets::want(int operation, MessageSocket& socket, bool room) {
  epoll_event event{};
  event.events = room ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = static_cast<std::uint64_t>(socket.rank());
  HORON_CHECK(::epoll_ctl(ready_.get(), operation, socket.fd(), &event) == 0,
              system_error_text("epoll_ctl", errno));
  wants_room_[static_cast<std::size_t>(socket.rank())] = room;
}

bool MessageSockets::receive(MessageSink& sink, bool* has_ended) {
  std::array<epoll_event, kMostEvents> events;
  const int n = ::epoll_wait(ready_.get(), events.data(), kMostEvents, 0);
  bool has_moved = false;
  for (int i = 0; i < n; ++i) {
    MessageSocket& socket = *at(static_cast<int>(events[static_cast<std::size_t>(i)].data.u64));
    has_moved = socket.receive(sink) || has_moved;
    has_moved = flush(socket) || has_moved;
    if (socket.state() != MessageSocket::State::kOpen) {  // or it would be ready for ever
      const auto index = static_cast<std::size_t>(socket.rank());
      if (is_watched_[index]) {
        is_watched_[index] = false;
        *has_ended = true;
        (void)::epoll_ctl(ready_.get(), EPOLL_CTL_DEL, socket.fd(), nullptr);
      }
    }
  }
  return has_moved;
}

bool MessageSockets::flush(MessageSocket& socket) {
  const bool has_moved = socket.flush();
  const auto index = static_cast<std::size_t>(socket.rank());
  if (is_watched_[index] && wants_room_[index] == socket.is_flushed()) {
    want(EPOLL_CTL_MOD, socket, !socket.is_flushed());
  }
  return has_moved;
}

bool MessageSockets::is_flushed() const {
  return std::all_of(by_rank_.begin(), by_rank_.end(),
                     [](const auto& socket) { return socket == nullptr || socket->is_flushed(); });
}

bool MessageSockets::is_delivered() const {
  return std::all_of(by_rank_.begin(), by_rank_.end(), [](const auto& socket) {
    return socket == nullptr || socket->state() != MessageSocket::State::kOpen ||
           socket->is_broken() || socket->delivered_until() == socket->put_until();
  });
}

void MessageSockets::put(const Frame& frame, const std::byte* payload) {
  for (const auto& socket : by_rank_) {
    if (socket) {
      socket->put(frame, payload);
      flush(*socket);
    }
  }
}

void MessageSockets::shut() {
  for (const auto& socket : by_rank_) {
    if (socket) {
      socket->shut();
    }
  }
}

bool MessageSockets::has_something() const {
  pollfd entry{ready_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

bool MessageSockets::arm() {
  const std::lock_guard lock(mutex_);
  if (is_stopped_ || has_no_thread_) {
    return false;
  }
  if (!thread_.joinable()) {
    try {
      thread_ = quiet_thread([this] { watch(); });
    } catch (const std::system_error& error) {
      has_no_thread_ = true;
      log_warning(concat("the system gives no thread to watch connections (", error.what(),
                         "); messages from other hosts may be noticed a millisecond later"));
      return false;
    }
  }
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = kReadyEvent;
  return ::epoll_ctl(armed_.get(), EPOLL_CTL_MOD, ready_.get(), &event) == 0;
}

void MessageSockets::watch() {
  name_this_thread("horon-sockets");
  while (true) {
    std::array<epoll_event, 2> events;
    const int n = ::epoll_wait(armed_.get(), events.data(), 2, -1);
    for (int i = 0; i < n; ++i) {
      if (events[static_cast<std::size_t>(i)].data.u64 == kStopEvent) {
        return;
      }
    }
    if (n > 0) {
      ring_();
    }
  }
}

void MessageSockets::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
    thread = std::move(thread_);
  }
  if (thread.joinable()) {
    const std::uint64_t one = 1;
    const ssize_t written = ::write(stop_.get(), &one, sizeof one);
    HORON_CHECK(written == sizeof one, system_error_text("write", errno));
    thread.join();
  }
}

}  // namespace horon
