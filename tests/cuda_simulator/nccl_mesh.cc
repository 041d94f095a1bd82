#include "nccl_mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "quiet_thread.h"

namespace horon::simulator {
namespace {

struct Address {
  sockaddr_un name{};
  socklen_t bytes;

  // In the abstract name space: a name that begins with 0 and is gone with its socket.
  Address(const std::string& id, int rank) {
    const std::string text = "horon-simulator/" + id + "/" + std::to_string(rank);
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

struct Frame {
  MessageKind kind;
  Signature signature;
  std::uint64_t bytes;
};

bool write_all(int socket, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return false;
    }
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return true;
}

bool read_all_bytes(int socket, void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket, at, bytes, 0);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return false;
    }
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

std::string system_error(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

}  // namespace

Mesh::~Mesh() {
  abort();
  for (Peer& peer : peers_) {
    if (peer.reader.joinable()) {
      peer.reader.join();
    }
    if (peer.socket >= 0) {
      close(peer.socket);
    }
  }
  if (listener_ >= 0) {
    close(listener_);
  }
}

// Ranks connect to all ranks below them, which listen before they do anything else.
std::string Mesh::connect(const std::string& id, int rank, int n_ranks) {
  {
    const std::lock_guard lock(mutex_);
    id_ = id;
    rank_ = rank;
    n_ranks_ = n_ranks;
    peers_.resize(static_cast<std::size_t>(n_ranks));
  }
  std::string error = listen();
  for (int peer = 0; peer < rank_ && error.empty(); ++peer) {
    const int socket = connect_to(peer);
    if (socket < 0) {
      return is_aborted() ? "aborted" : system_error("connect");
    }
    peers_[static_cast<std::size_t>(peer)].socket = socket;
  }
  for (int missing = n_ranks_ - 1 - rank_; missing > 0 && error.empty(); --missing) {
    int peer = -1;
    const std::optional<int> socket = accept_one(&peer);
    if (!socket) {
      return is_aborted() ? "aborted" : system_error("accept");
    }
    if (peer <= rank_ || peer >= n_ranks_ || peers_[static_cast<std::size_t>(peer)].socket >= 0) {
      close(*socket);
      return "two ranks of a communicator have one number, or different counts of ranks";
    }
    peers_[static_cast<std::size_t>(peer)].socket = *socket;
  }
  return error.empty() && !start_readers() ? "aborted" : error;
}

std::string Mesh::listen() {
  const Address address(id_, rank_);
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener_ < 0 || bind(listener_, address.get(), address.bytes) != 0 ||
      ::listen(listener_, n_ranks_) != 0) {
    return system_error("listen");
  }
  return "";
}

// Tries until the peer listens. -1 if that fails or is aborted.
int Mesh::connect_to(int peer) {
  const Address address(id_, peer);
  while (!is_aborted()) {
    const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made < 0) {
      return -1;
    }
    if (::connect(made, address.get(), address.bytes) == 0) {
      write_all(made, &rank_, sizeof rank_);
      return made;
    }
    const int error = errno;
    close(made);
    if (error != ECONNREFUSED && error != EAGAIN && error != EINTR) {
      errno = error;
      return -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // nothing says that a peer listens
  }
  return -1;
}

std::optional<int> Mesh::accept_one(int* peer) {
  while (!is_aborted()) {
    pollfd waiting{listener_, POLLIN, 0};
    if (poll(&waiting, 1, /*timeout ms=*/20) <= 0) {
      continue;
    }
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
      return std::nullopt;
    }
    if (read_all_bytes(socket, peer, sizeof *peer)) {
      return socket;
    }
    close(socket);  // it came and died
  }
  return std::nullopt;
}

// False when aborted: then nobody is there to end them.
bool Mesh::start_readers() {
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < n_ranks_ && !is_aborted(); ++peer) {
    if (peer != rank_) {
      peers_[static_cast<std::size_t>(peer)].reader =
          quiet_thread([this, peer] { read_all(peer); });
    }
  }
  return !is_aborted();
}

void Mesh::read_all(int peer) {
  const int socket = peers_[static_cast<std::size_t>(peer)].socket;
  while (true) {
    Frame frame{};
    Message message;
    bool is_whole = read_all_bytes(socket, &frame, sizeof frame);
    if (is_whole && frame.kind == MessageKind::kGoodbye) {
      return;
    }
    if (is_whole) {
      message = {frame.signature, Bytes(frame.bytes)};
      is_whole = read_all_bytes(socket, message.payload.data(), frame.bytes);
    }
    if (!is_whole) {
      if (!is_aborted()) {
        has_lost_peer_.store(true, std::memory_order_relaxed);
      }
      return;
    }
    deliver(peer, frame.kind, std::move(message));
  }
}

void Mesh::deliver(int peer, MessageKind kind, Message message) {
  const std::lock_guard lock(mutex_);
  peers_[static_cast<std::size_t>(peer)].received[static_cast<std::size_t>(kind)].push_back(
      std::move(message));
  changed_.notify_all();
}

void Mesh::send(int peer, MessageKind kind, const Signature& signature, const std::byte* payload,
                std::size_t bytes) {
  if (peer == rank_) {
    deliver(peer, kind, {signature, Bytes(payload, payload + bytes)});
    return;
  }
  Peer& to = peers_[static_cast<std::size_t>(peer)];
  const Frame frame{kind, signature, bytes};
  const std::lock_guard lock(to.sending);
  if (write_all(to.socket, &frame, sizeof frame)) {
    write_all(to.socket, payload, bytes);
  }
}

std::optional<Message> Mesh::receive(int peer, MessageKind kind) {
  auto& received = peers_[static_cast<std::size_t>(peer)].received[static_cast<std::size_t>(kind)];
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_aborted() || !received.empty(); });
  if (received.empty() || is_aborted()) {
    return std::nullopt;
  }
  Message message = std::move(received.front());
  received.pop_front();
  return message;
}

void Mesh::wait_for_abort() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_aborted(); });
}

void Mesh::abort() {
  const std::lock_guard lock(mutex_);
  is_aborted_.store(true, std::memory_order_relaxed);
  for (const Peer& peer : peers_) {
    if (peer.reader.joinable()) {  // else connect() is still at work, and looks at the flag
      shutdown(peer.socket, SHUT_RDWR);
    }
  }
  changed_.notify_all();
}

void Mesh::say_goodbye() {
  for (int peer = 0; peer < n_ranks_; ++peer) {
    if (peer != rank_ && peers_[static_cast<std::size_t>(peer)].socket >= 0) {
      send(peer, MessageKind::kGoodbye, {}, nullptr, 0);
    }
  }
}

}  // namespace horon::simulator
