#include "cross/tcp_byte_transport.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/error.h"
#include "core/running_operation.h"
#include "net/tcp_socket.h"
#include "watch/stall_schedule.h"

namespace horon {
namespace {

// Of one connection before the next gets its turn.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 20;
// Before it sleeps: what a wake-up takes on a virtual machine.
constexpr std::chrono::microseconds kLookAgain{50};
// How often who sleeps looks around.
constexpr std::chrono::milliseconds kSlice{100};

// The next bytes of a head and what follows it, of which so many are done.
template <typename Byte, typename Head>
std::array<iovec, 2> rest_of(Head& head, Byte* data, std::size_t bytes, std::size_t done,
                             int* n_parts) {
  std::array<iovec, 2> parts{};
  *n_parts = 0;
  std::size_t offset = done;
  if (done < sizeof head) {
    parts[0] = {reinterpret_cast<std::byte*>(&head) + done, sizeof head - done};
    *n_parts = 1;
    offset = 0;
  } else {
    offset -= sizeof head;
  }
  const std::size_t most = std::min(bytes - offset, kMostAtOnce);
  if (most > 0) {
    parts[static_cast<std::size_t>(*n_parts)] = {const_cast<std::byte*>(data) + offset, most};
    ++*n_parts;
  }
  return parts;
}

}  // namespace

TcpByteTransport::TcpByteTransport(int rank, int n_ranks, std::vector<RemotePeer> peers)
    : rank_(rank) {
  HORON_CHECK(static_cast<int>(peers.size()) == n_ranks - 1, "a group of ", n_ranks,
              " ranks has met with ", peers.size(), " connections");
  for (RemotePeer& peer : peers) {
    Connection connection;
    let_peer_be_late(peer.socket.get());
    connection.guard = std::make_unique<ClosedInChild>(peer.socket.get());
    connection.peer = std::move(peer);
    connections_.push_back(std::move(connection));
  }
}

void TcpByteTransport::all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                                  const WaitContext& context) {
  const std::size_t n = connections_.size() + 1;
  ReceivedSpans to;
  for (std::size_t source = 0; source < n; ++source) {
    to.push_back({receive + source * bytes, bytes});
  }
  exchange(SentSpans(n, {send, bytes}), to, context);
  std::memcpy(receive + static_cast<std::size_t>(rank_) * bytes, send, bytes);
}

void TcpByteTransport::exchange(const SentSpans& send, const ReceivedSpans& receive,
                                const WaitContext& context) {
  check_aborted();
  ++number_;
  std::size_t n_open = 0;
  for (Connection& connection : connections_) {
    const auto rank = static_cast<std::size_t>(connection.peer.rank);
    connection.to_send = send[rank];
    connection.to_receive = receive[rank];
    connection.sent_head = {number_, send[rank].bytes};
    connection.sent = 0;
    connection.received = 0;
    n_open += connection.is_done() ? 0 : 1;
  }
  LongWait long_wait;
  auto last_move = Clock::now();
  auto next_look = last_move + kSlice;
  while (n_open > 0) {
    bool has_moved = false;
    for (Connection& connection : connections_) {
      if (connection.is_done()) {
        continue;
      }
      // Both, whatever the first says.
      const bool has_sent = send_some(connection);
      const bool has_received = receive_some(connection);
      has_moved = has_moved || has_sent || has_received;
      n_open -= connection.is_done() ? 1 : 0;
    }
    if (n_open == 0) {
      break;
    }
    const auto now = Clock::now();
    if (now >= next_look) {
      look_around(context, long_wait);
      next_look = now + kSlice;
    }
    if (has_moved) {
      last_move = now;
    } else if (now - last_move < kLookAgain) {
      ::sched_yield();
    } else {
      wait(context, long_wait);
    }
  }
  long_wait.go_on();
}

bool TcpByteTransport::send_some(Connection& connection) {
  if (connection.has_sent()) {
    return false;
  }
  msghdr message{};
  int n_parts = 0;
  auto parts = rest_of(connection.sent_head, connection.to_send.data, connection.to_send.bytes,
                       connection.sent, &n_parts);
  message.msg_iov = parts.data();
  message.msg_iovlen = static_cast<std::size_t>(n_parts);
  const ssize_t sent =
      ::sendmsg(connection.peer.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (would_block()) {
      return false;
    }
    // What it has said before it went may still be there to be read.
    if (!connection.has_received() && receive_some(connection)) {
      return true;
    }
    lose(connection, system_error_text("send", errno));
  }
  connection.sent += static_cast<std::size_t>(sent);
  return true;
}

bool TcpByteTransport::receive_some(Connection& connection) {
  if (connection.has_received()) {
    return false;
  }
  msghdr message{};
  int n_parts = 0;
  auto parts = rest_of(connection.received_head, connection.to_receive.data,
                       connection.to_receive.bytes, connection.received, &n_parts);
  message.msg_iov = parts.data();
  message.msg_iovlen = static_cast<std::size_t>(n_parts);
  const ssize_t received = ::recvmsg(connection.peer.socket.get(), &message, MSG_DONTWAIT);
  if (received == 0) {
    lose(connection, "it died, or has left or ended the group");
  }
  if (received < 0) {
    if (would_block()) {
      return false;
    }
    lose(connection, system_error_text("recv", errno));
  }
  const bool had_head = connection.received >= sizeof(Head);
  connection.received += static_cast<std::size_t>(received);
  if (!had_head && connection.received >= sizeof(Head)) {
    check_head(connection);
  }
  return true;
}

void TcpByteTransport::check_head(const Connection& connection) const {
  const Head& head = connection.received_head;
  if (head.number != number_ || head.bytes != connection.to_receive.bytes) {
    throw GroupError(concat(connection.peer.description, " sent ", head.bytes,
                            " bytes in exchange #", head.number, " where ",
                            connection.to_receive.bytes, " were expected in #", number_,
                            ". This is a bug in horon."));
  }
}

void TcpByteTransport::lose(const Connection& connection, const std::string& why) {
  check_aborted();
  throw PeerLostError(concat(connection.peer.description, " closed its connection: ", why));
}

void TcpByteTransport::look_around(const WaitContext& context, LongWait& long_wait) {
  if (context.check_interrupt != nullptr) {
    (*context.check_interrupt)();
  }
  check_aborted();
  if (!context.deadline.has_passed()) {
    long_wait.look(context.deadline, [&](bool) { return what_is_awaited(context); });
    return;
  }
  std::string whom;
  std::vector<int> missing;
  for (const Connection& connection : connections_) {
    if (!connection.is_done()) {
      missing.push_back(connection.peer.number);
      whom += concat(whom.empty() ? "" : ", ", connection.peer.description);
    }
  }
  throw TimeoutError(
      concat("Timed out waiting ", context.deadline.timeout().count(), "ms for ", whom), missing);
}

Waiting TcpByteTransport::what_is_awaited(const WaitContext& context) const {
  Waiting waiting;
  waiting.operation = RunningOperation::description();
  std::vector<int> missing;
  for (const Connection& connection : connections_) {
    if (!connection.is_done()) {
      missing.push_back(connection.peer.rank);
      waiting.late.push_back({connection.peer.description, 0, "", connection.peer.door});
    }
  }
  waiting.reports = is_first_to_come(rank_, missing);
  waiting.is_blocking = context.may_linger;
  return waiting;
}

void TcpByteTransport::wait(const WaitContext& context, LongWait& long_wait) {
  look_around(context, long_wait);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(context.deadline.remaining());
  std::vector<pollfd> entries;
  for (const Connection& connection : connections_) {
    if (connection.is_done()) {
      continue;
    }
    const int events =
        (connection.has_sent() ? 0 : POLLOUT) | (connection.has_received() ? 0 : POLLIN);
    entries.push_back({connection.peer.socket.get(), static_cast<short>(events), 0});
  }
  const auto limit =
      std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(1), kSlice);
  const int ready = ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
  HORON_CHECK(ready >= 0 || errno == EINTR, system_error_text("poll", errno));
}

void TcpByteTransport::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!aborted_.empty()) {
    return;
  }
  aborted_ = reason.empty() ? "aborted" : reason;
  for (const Connection& connection : connections_) {
    ::shutdown(connection.peer.socket.get(), SHUT_RDWR);
  }
}

void TcpByteTransport::depart() {
  for (const Connection& connection : connections_) {
    ::shutdown(connection.peer.socket.get(), SHUT_WR);  // what was sent still arrives
  }
}

void TcpByteTransport::check_aborted() {
  const std::lock_guard lock(mutex_);
  if (!aborted_.empty()) {
    throw GroupError(aborted_);
  }
}

}  // namespace horon
