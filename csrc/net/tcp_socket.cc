#include "net/tcp_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <sstream>

#include "core/error.h"

namespace horon {
namespace {

constexpr int kBacklog = 4096;  // all ranks of a large job at once; the system caps it

void set_option(int socket, int level, int option, int value, const char* name) {
  HORON_CHECK(::setsockopt(socket, level, option, &value, sizeof value) == 0,
              system_error_text(name, errno));
}

// IPv6 takes IPv4 connections, too. Hosts without IPv6 exist.
UniqueFd bound_socket() {
  UniqueFd socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket) {
    set_option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0, "setsockopt(IPV6_V6ONLY)");
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0) {
      return socket;
    }
  }
  socket = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  HORON_CHECK(socket, system_error_text("socket(AF_INET)", errno));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  HORON_CHECK(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0,
              system_error_text("bind", errno));
  return socket;
}

std::set<std::string> split(const std::string& list) {
  std::set<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) {
    if (!part.empty()) {
      parts.insert(part);
    }
  }
  return parts;
}

std::string numeric_address(const sockaddr& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.sa_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
  }
  return text;
}

// A link-local address means nothing without a scope that only its own host knows.
bool is_usable(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) {
    return false;
  }
  if (entry.ifa_addr->sa_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(*entry.ifa_addr);
    return !IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr);
  }
  return entry.ifa_addr->sa_family == AF_INET;
}

}  // namespace

UniqueFd listen_tcp(std::uint16_t* port) {
  UniqueFd socket = bound_socket();
  HORON_CHECK(::listen(socket.get(), kBacklog) == 0, system_error_text("listen", errno));
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  HORON_CHECK(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &length) == 0,
              system_error_text("getsockname", errno));
  *port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                            : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  return socket;
}

std::vector<std::string> own_addresses(const std::string& interfaces) {
  const std::set<std::string> wanted = split(interfaces);
  ifaddrs* list = nullptr;
  HORON_CHECK(::getifaddrs(&list) == 0, system_error_text("getifaddrs", errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<std::string> addresses;
  std::vector<std::string> local_ones;
  std::set<std::string> names;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (!is_usable(*entry)) {
      continue;
    }
    names.insert(entry->ifa_name);
    if (wanted.empty() || wanted.count(entry->ifa_name) > 0) {
      const bool is_local = (entry->ifa_flags & IFF_LOOPBACK) != 0;
      (is_local ? local_ones : addresses).push_back(numeric_address(*entry->ifa_addr));
    }
  }
  addresses.insert(addresses.end(), local_ones.begin(), local_ones.end());
  if (addresses.empty()) {
    std::string found;
    for (const std::string& name : names) {
      found += (found.empty() ? "" : ", ") + name;
    }
    throw UsageError(concat("no address on the network interfaces '", interfaces,
                            "'. Interfaces with an address: ", found.empty() ? "none" : found,
                            '.'));
  }
  return addresses;
}

UniqueFd begin_connect(const std::string& address, std::uint16_t port, int* error) {
  const auto fail = [error](int why) {
    if (error != nullptr) {
      *error = why;
    }
    return UniqueFd();
  };
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return fail(EADDRNOTAVAIL);
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  UniqueFd socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket ||
      (::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS)) {
    return fail(errno);
  }
  return socket;
}

int connect_error(int socket) {
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

std::string peer_address(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return "";
  }
  return numeric_address(reinterpret_cast<const sockaddr&>(address));
}

UniqueFd accept_tcp(int listener) {
  UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    // What went wrong with a connection before it was accepted is that connection's matter.
    HORON_CHECK(errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != EBADF,
                system_error_text("accept4", errno));
  }
  return socket;
}

void set_up_connection(int socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "setsockopt(TCP_NODELAY)");
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "setsockopt(SO_KEEPALIVE)");
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10, "setsockopt(TCP_KEEPIDLE)");
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5, "setsockopt(TCP_KEEPINTVL)");
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3, "setsockopt(TCP_KEEPCNT)");
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 25'000, "setsockopt(TCP_USER_TIMEOUT)");
}

void let_peer_be_late(int socket) {
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 0, "setsockopt(TCP_USER_TIMEOUT)");
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

bool wait_for_socket(int socket, short events, const WaitContext& context) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(context.deadline.remaining());
    if (left.count() <= 0) {
      return false;
    }
    pollfd entry{socket, events, 0};
    constexpr std::int64_t kSlice = 200;  // milliseconds until Ctrl-C is looked for
    const int ready =
        ::poll(&entry, 1, static_cast<int>(std::min<std::int64_t>(left.count(), kSlice)));
    if (ready > 0) {
      return true;
    }
    HORON_CHECK(ready == 0 || errno == EINTR, system_error_text("poll", errno));
    if (context.check_interrupt != nullptr) {
      (*context.check_interrupt)();
    }
  }
}

void send_all(int socket, const void* data, std::size_t bytes, const WaitContext& context) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent > 0) {
      at += sent;
      bytes -= static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for_socket(socket, POLLOUT, context)) {
        throw TimeoutError("Timed out sending to a peer");
      }
    } else {
      HORON_CHECK(errno == EINTR, system_error_text("send", errno));
    }
  }
}

void receive_all(int socket, void* data, std::size_t bytes, const WaitContext& context) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t received = ::recv(socket, at, bytes, 0);
    if (received > 0) {
      at += received;
      bytes -= static_cast<std::size_t>(received);
    } else if (received == 0) {
      throw Error("the peer closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for_socket(socket, POLLIN, context)) {
        throw TimeoutError("Timed out waiting for a peer to answer");
      }
    } else {
      HORON_CHECK(errno == EINTR, system_error_text("recv", errno));
    }
  }
}

}  // namespace horon
