// How a rank that listens and the ranks that connect to it find and recognise each other.
//
// Note [Meeting]
// Who listens puts its addresses, the port and a nonce into the store. The others try all addresses
// at once and greet whoever answers first with the nonce: behind an address that exists on every
// host (a bridge of containers) somebody else may listen. Who listens refuses a greeting without
// the nonce, answers one that has it, and counts a rank when that has read the answer. Of two
// ranks the lower one listens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/unique_fd.h"
#include "core/wait_context.h"
#include "core/watch_door.h"

namespace horon {

// A connection to another rank.
struct RemotePeer {
  int rank = 0;
  int number = 0;           // what messages call it
  int stream = 0;           // which of the connections between these two
  std::string description;  // "rank 1 (pid 123 on host-b)"
  UniqueFd socket;          // connected; does not block
  Door door = {};           // where it can be asked what it is doing
};

// Where a rank listens; in the store one line, so that a person can read it.
struct Place {
  std::uint64_t nonce = 0;
  std::uint16_t port = 0;
  std::vector<std::string> addresses;

  std::string encode() const;
  // Of rank `number`. Throws UsageError where that said why there is none, Error.
  static Place decode(const std::string& text, int number);
  // "10.0.0.1 port 1234, 10.0.1.1 port 1234".
  std::string describe() const;
};

struct Listener {
  UniqueFd socket;
  Place place;
};

// `interfaces` as in own_addresses. Throws UsageError, Error.
Listener listen_for_peers(const std::string& interfaces);

// What the others read where a rank can not listen.
std::string failed_place(const std::string& reason);

// What a rank says of itself.
struct Introduction {
  int rank = 0;
  int number = 0;
  int stream = 0;
  DoorKey door = {};
};

// Connects to rank `rank`, which messages call `number`. Throws TimeoutError, Error.
RemotePeer reach(const Place& place, int rank, int number, const Introduction& own,
                 const WaitContext& context);

// Connections from each rank after `own`, `n_streams` of each, by stream and rank. `numbers`: what
// messages call the ranks, by rank. Throws TimeoutError (naming who is missing).
std::vector<RemotePeer> receive_peers(const Listener& listener, const Introduction& own,
                                      const std::vector<int>& numbers, int n_streams,
                                      const WaitContext& context);

}  // namespace horon
