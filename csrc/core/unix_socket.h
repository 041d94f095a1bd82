// Sockets between processes of one host that carry file descriptors: abstract names, whole messages
// (SOCK_SEQPACKET), nothing left in the file system.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/unique_fd.h"

namespace horon {

// What travels besides descriptors. Plain data.
struct SocketMessage {
  std::uint64_t nonce = 0;
  std::int32_t rank = -1;
  std::int32_t n_descriptors = 0;
};

// A socket that listens on an abstract name.
UniqueFd listen_on(const std::string& name);

// Connects; an empty UniqueFd when nobody listens there (another network namespace, or gone).
UniqueFd connect_to(const std::string& name);

// The same, but does not wait for longer where nobody accepts connections.
UniqueFd connect_until(const std::string& name, const Deadline& wait_until);

// Waits for the next connection until `wait_until` has passed: then an empty UniqueFd.
UniqueFd accept_until(int listener, const Deadline& wait_until);

// Of the process at the other end; of who listened, for who connected.
ucred peer_credentials(int socket);

// Waits for the next message until `wait_until` has passed; then false. True as well when the peer
// is gone, of which receive_message() tells.
bool has_message(int socket, const Deadline& wait_until);

// Both throw Error when the peer is gone, TimeoutError at the deadline.
void send_message(int socket, const SocketMessage& message, const std::vector<int>& descriptors,
                  const Deadline& deadline);
SocketMessage receive_message(int socket, std::vector<UniqueFd>* descriptors,
                              const Deadline& deadline);

}  // namespace horon
