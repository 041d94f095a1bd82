#include "cross/tcp_control_channel.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/thread_name.h"
#include "net/tcp_socket.h"

namespace horon {
namespace {

constexpr std::uint32_t kMaxFrameBytes = std::uint32_t{1} << 30;
constexpr std::uint32_t kMaxPoisonBytes = 64 * 1024;
// How long a rank that leaves waits for its last words to go out.
constexpr std::chrono::seconds kFlushPatience{2};

}  // namespace

TcpControlChannel::TcpControlChannel(int rank, int n_ranks, std::vector<RemotePeer> peers)
    : rank_(rank),
      n_ranks_(n_ranks),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  HORON_CHECK(epoll_ && stop_, system_error_text("epoll_create1 or eventfd", errno));
  epoll_event event{};
  event.events = EPOLLIN;
  HORON_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &event) == 0,
              system_error_text("epoll_ctl", errno));
  for (RemotePeer& peer : peers) {
    auto connection = std::make_unique<Connection>();
    connection->peer = std::move(peer);
    const int socket = connection->peer.socket.get();
    connection->guard.emplace(socket);
    // Edges: of room to write only one after a write that found none.
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.ptr = connection.get();
    HORON_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) == 0,
                system_error_text("epoll_ctl", errno));
    connections_.push_back(std::move(connection));
  }
  reader_ = start_thread([this] { read_loop(); });
}

TcpControlChannel::~TcpControlChannel() {
  const std::uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof one);
  reader_.join();
}

std::vector<LateRank> TcpControlChannel::late_ranks(const std::vector<int>& ranks) const {
  std::vector<LateRank> late;
  for (const auto& connection : connections_) {
    if (std::find(ranks.begin(), ranks.end(), connection->peer.rank) != ranks.end()) {
      late.push_back({connection->peer.description, 0, "", connection->peer.door});
    }
  }
  return late;
}

TcpControlChannel::Connection* TcpControlChannel::connection_to(int rank) {
  const int index = rank_ == 0 ? rank - 1 : 0;
  HORON_CHECK(rank_ == 0 ? rank > 0 && rank < n_ranks_ : rank == 0, "rank ", rank_,
              " has no control connection to rank ", rank);
  return connections_[static_cast<std::size_t>(index)].get();
}

void TcpControlChannel::queue_frame(Connection& connection, FrameType type, const void* data,
                                    std::size_t bytes) {
  HORON_CHECK(bytes <= kMaxFrameBytes, "a control message of ", bytes, " bytes is too long");
  const FrameHead head{type, static_cast<std::uint32_t>(bytes)};
  Bytes frame(sizeof head + bytes);
  std::memcpy(frame.data(), &head, sizeof head);
  if (bytes > 0) {
    std::memcpy(frame.data() + sizeof head, data, bytes);
  }
  connection.outgoing.push_back(std::move(frame));
}

void TcpControlChannel::send(int rank, Bytes bytes, bool is_urgent) {
  Connection* const connection = connection_to(rank);
  const std::lock_guard lock(mutex_);
  if (connection->is_open) {
    queue_frame(*connection, is_urgent ? FrameType::kUrgentMessage : FrameType::kMessage,
                bytes.data(), bytes.size());
  }
}

// True when nothing is left to be written. A broken connection is the reader's to notice.
bool TcpControlChannel::write_some(Connection& connection) {
  while (connection.is_open && !connection.outgoing.empty()) {
    const Bytes& frame = connection.outgoing.front();
    const ssize_t sent = ::send(connection.peer.socket.get(), frame.data() + connection.written,
                                frame.size() - connection.written, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return false;
      }
      connection.is_open = false;
      break;
    }
    connection.written += static_cast<std::size_t>(sent);
    if (connection.written == frame.size()) {
      connection.outgoing.pop_front();
      connection.written = 0;
    }
  }
  if (!connection.is_open) {
    connection.outgoing.clear();
    connection.written = 0;
  }
  return true;
}

bool TcpControlChannel::write_all() {
  bool is_all = true;
  for (const auto& connection : connections_) {
    is_all = write_some(*connection) && is_all;
  }
  return is_all;
}

bool TcpControlChannel::flush() {
  const std::lock_guard lock(mutex_);
  return write_all();
}

bool TcpControlChannel::receive(int* source, Bytes* bytes) {
  const std::lock_guard lock(mutex_);
  if (inbox_.empty()) {
    return false;
  }
  *source = inbox_.front().source;
  *bytes = std::move(inbox_.front().bytes);
  inbox_.pop_front();
  return true;
}

void TcpControlChannel::sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) {
  bell_.sleep(sleeper, seen, limit);
}

// A network is not worth spinning for.
bool TcpControlChannel::spin(std::uint32_t seen) { return events() != seen; }

std::string TcpControlChannel::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool TcpControlChannel::has_departed(int rank) {
  const Connection* const connection = connection_to(rank);
  const std::lock_guard lock(mutex_);
  return connection->has_departed;
}

void TcpControlChannel::poison_here(const std::string& reason, const Connection* told_by) {
  if (!failure_.empty()) {
    return;
  }
  failure_ = reason.empty() ? "somebody aborted" : reason;
  const std::size_t bytes = std::min<std::size_t>(failure_.size(), kMaxPoisonBytes);
  for (const auto& connection : connections_) {
    if (connection.get() != told_by) {
      queue_frame(*connection, FrameType::kPoison, failure_.data(), bytes);
    }
  }
  write_all();
  is_poisoned_.store(true, std::memory_order_release);
  bell_.ring(true);
}

void TcpControlChannel::poison(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  poison_here(reason, nullptr);
}

void TcpControlChannel::depart() {
  const WaitContext context{Deadline::after(kFlushPatience), nullptr};
  for (const auto& connection : connections_) {
    std::unique_lock lock(mutex_);
    has_left_ = true;
    if (connection->is_open) {
      queue_frame(*connection, FrameType::kGoodbye, nullptr, 0);
    }
    while (!write_some(*connection) && !context.deadline.has_passed()) {
      lock.unlock();
      wait_for_socket(connection->peer.socket.get(), POLLOUT, context);
      lock.lock();
    }
  }
}

void TcpControlChannel::read_loop() {
  name_this_thread("horon-control");
  std::array<epoll_event, 64> events{};
  while (true) {
    const int n =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), /*forever*/ -1);
    for (int i = 0; i < n; ++i) {
      auto* const connection =
          static_cast<Connection*>(events[static_cast<std::size_t>(i)].data.ptr);
      if (connection == nullptr) {
        return;  // the destructor calls
      }
      const std::uint32_t what = events[static_cast<std::size_t>(i)].events;
      if ((what & EPOLLOUT) != 0) {
        const std::lock_guard lock(mutex_);
        const bool had_something = !connection->outgoing.empty();
        if (write_some(*connection) && had_something) {
          bell_.ring(true);  // who attends may sleep until it is flushed
        }
      }
      if ((what & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) {
        read_from(*connection);
      }
    }
  }
}

// Takes all that is there, which edges ask for.
void TcpControlChannel::read_from(Connection& connection) {
  try {
    while (read_some(connection)) {
      if (connection.head_bytes == sizeof(FrameHead) &&
          connection.body_bytes == connection.body.size()) {
        take_frame(connection);
      }
    }
  } catch (const std::exception& error) {  // a damaged frame, or no memory
    lose(connection, error.what());
  }
}

// One recv. False when nothing is there, and when nothing comes any more.
bool TcpControlChannel::read_some(Connection& connection) {
  const bool is_head = connection.head_bytes < sizeof(FrameHead);
  std::byte* const at = is_head
                            ? reinterpret_cast<std::byte*>(&connection.head) + connection.head_bytes
                            : connection.body.data() + connection.body_bytes;
  const std::size_t wanted = is_head ? sizeof(FrameHead) - connection.head_bytes
                                     : connection.body.size() - connection.body_bytes;
  ssize_t received = 0;
  do {
    received = ::recv(connection.peer.socket.get(), at, wanted, MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    return false;
  }
  if (received <= 0) {
    lose(connection, received == 0 ? "its connection was closed"
                                   : system_error_text("its connection broke: recv", errno));
    return false;
  }
  if (!is_head) {
    connection.body_bytes += static_cast<std::size_t>(received);
    return true;
  }
  connection.head_bytes += static_cast<std::size_t>(received);
  if (connection.head_bytes == sizeof(FrameHead)) {
    HORON_CHECK(
        connection.head.type <= FrameType::kGoodbye && connection.head.bytes <= kMaxFrameBytes,
        "it sent a damaged message");
    connection.body.assign(connection.head.bytes, std::byte{});
    connection.body_bytes = 0;
  }
  return true;
}

void TcpControlChannel::take_frame(Connection& connection) {
  const std::lock_guard lock(mutex_);
  switch (connection.head.type) {
    case FrameType::kMessage:
    case FrameType::kUrgentMessage:
      inbox_.push_back({connection.peer.rank, std::move(connection.body)});
      bell_.ring(connection.head.type == FrameType::kUrgentMessage);
      break;
    case FrameType::kPoison:
      poison_here({reinterpret_cast<const char*>(connection.body.data()), connection.body.size()},
                  &connection);
      break;
    case FrameType::kGoodbye:
      connection.has_departed = true;
      bell_.ring(true);
      break;
  }
  connection.head_bytes = 0;
  connection.body.clear();
  connection.body_bytes = 0;
}

void TcpControlChannel::lose(Connection& connection, const std::string& why) {
  const std::lock_guard lock(mutex_);
  connection.is_open = false;
  connection.outgoing.clear();
  connection.written = 0;
  if (!connection.has_departed && !has_left_) {
    poison_here(concat(connection.peer.description, " died or can not be reached: ", why),
                &connection);
  }
}

}  // namespace horon
