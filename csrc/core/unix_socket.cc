#include "core/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "core/error.h"

namespace horon {
namespace {

constexpr int kMaxDescriptorsPerMessage = 250;  // SCM_MAX_FD is 253

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  HORON_CHECK(name.size() + 1 < sizeof address.sun_path, "socket name '", name, "' is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading 0 byte: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

UniqueFd open_socket(int flags = 0) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  HORON_CHECK(fd, system_error_text("socket(AF_UNIX)", errno));
  return fd;
}

// False when the deadline passed.
bool wait_readable(int fd, const Deadline& deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining());
    if (left.count() < 0) {
      return false;
    }
    pollfd entry{fd, POLLIN, 0};
    const int ready =
        ::poll(&entry, 1, static_cast<int>(std::min<std::int64_t>(left.count() + 1, 1000)));
    if (ready > 0) {
      return true;
    }
    HORON_CHECK(ready == 0 || errno == EINTR, system_error_text("poll", errno));
  }
}

}  // namespace

UniqueFd listen_on(const std::string& name) {
  UniqueFd fd = open_socket();
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  HORON_CHECK(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0,
              system_error_text("bind", errno));
  HORON_CHECK(::listen(fd.get(), SOMAXCONN) == 0, system_error_text("listen", errno));
  return fd;
}

UniqueFd connect_to(const std::string& name) {
  UniqueFd fd = open_socket();
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return UniqueFd();
  }
  return fd;
}

UniqueFd connect_until(const std::string& name, const Deadline& wait_until) {
  constexpr std::chrono::milliseconds kAgainAfter{10};  // no event tells of room in a backlog
  UniqueFd fd = open_socket(SOCK_NONBLOCK);
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EAGAIN || wait_until.has_passed()) {
      return UniqueFd();
    }
    std::this_thread::sleep_for(kAgainAfter);
  }
  return fd;
}

UniqueFd accept_until(int listener, const Deadline& wait_until) {
  if (!wait_readable(listener, wait_until)) {
    return UniqueFd();
  }
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  HORON_CHECK(fd, system_error_text("accept4", errno));
  return fd;
}

bool has_message(int socket, const Deadline& wait_until) {
  return wait_readable(socket, wait_until);
}

ucred peer_credentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  HORON_CHECK(::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0,
              system_error_text("getsockopt(SO_PEERCRED)", errno));
  return credentials;
}

void send_message(int socket, const SocketMessage& message, const std::vector<int>& descriptors,
                  const Deadline& deadline) {
  HORON_CHECK(descriptors.size() <= kMaxDescriptorsPerMessage, "too many descriptors in a message");
  SocketMessage copy = message;
  copy.n_descriptors = static_cast<std::int32_t>(descriptors.size());
  iovec data{&copy, sizeof copy};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerMessage)] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), sizeof(int) * descriptors.size());
  }
  // Linux lets a user have as many descriptors under way as a process may have open; receivers take
  // them off it.
  ssize_t sent = ::sendmsg(socket, &header, MSG_NOSIGNAL);
  while (sent < 0 && (errno == EINTR || (errno == ETOOMANYREFS && !deadline.has_passed()))) {
    if (errno == ETOOMANYREFS) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    sent = ::sendmsg(socket, &header, MSG_NOSIGNAL);
  }
  HORON_CHECK(sent == static_cast<ssize_t>(sizeof copy), system_error_text("sendmsg", errno));
}

SocketMessage receive_message(int socket, std::vector<UniqueFd>* descriptors,
                              const Deadline& deadline) {
  if (!wait_readable(socket, deadline)) {
    throw TimeoutError("Timed out waiting for a peer's message while the group was made");
  }
  SocketMessage message;
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptorsPerMessage)];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t received = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  // Take ownership before anything can throw.
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
        descriptors->emplace_back(fd);
      }
    }
  }
  HORON_CHECK(received < 0 || (header.msg_flags & MSG_CTRUNC) == 0,
              "a peer's file descriptors did not all arrive: this process may have too few open "
              "(ulimit -n)");
  HORON_CHECK(received == static_cast<ssize_t>(sizeof message),
              received < 0 ? system_error_text("recvmsg", errno)
                           : std::string("the peer closed the connection"));
  return message;
}

}  // namespace horon
