// TCP between hosts: small messages, each worth sending at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/unique_fd.h"
#include "core/wait_context.h"

namespace horon {

// Listens on all addresses, on a port that the system chooses. Throws Error.
UniqueFd listen_tcp(std::uint16_t* port);

// The numeric addresses by which other hosts may reach this one; those that only this host can use
// come last. With `interfaces` ("eth0,eth1"), only what they have: throws UsageError, saying what
// there is, when they have none.
std::vector<std::string> own_addresses(const std::string& interfaces);

// Begins to connect to a numeric address. An empty UniqueFd where this host has no way there, or
// is refused at once: then `error`, unless it is null, gets an errno.
UniqueFd begin_connect(const std::string& address, std::uint16_t port, int* error = nullptr);
// 0 when a socket of begin_connect that poll() found writable is connected, else an errno.
int connect_error(int socket);

// The numeric address of who is at the other end; empty if there is nobody any more.
std::string peer_address(int socket);

// Accepts without waiting; an empty UniqueFd when nobody is there.
UniqueFd accept_tcp(int listener);

// Sends at once, and notices within half a minute that the other host does not answer any more.
// Never blocks on it from then on.
void set_up_connection(int socket);

// For large messages between peers that may be late: what has been sent may lie there as long as
// the peer's system answers. A host that does not answer is still noticed within half a minute
// while nothing is on its way to it.
void let_peer_be_late(int socket);

// Waits until one of the events (of poll) is there. False at the deadline. Throws what
// context.check_interrupt throws.
bool wait_for_socket(int socket, short events, const WaitContext& context);

// Whether errno says that a socket that does not block can not go on now.
bool would_block();

// Whole messages, of a socket that does not block. Throw Error when the peer is gone, TimeoutError
// at the deadline.
void send_all(int socket, const void* data, std::size_t bytes, const WaitContext& context);
void receive_all(int socket, void* data, std::size_t bytes, const WaitContext& context);

}  // namespace horon
