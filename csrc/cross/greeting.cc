#include "cross/greeting.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "core/random_nonce.h"
#include "core/rank_list.h"
#include "core/this_host.h"
#include "net/tcp_socket.h"

namespace horon {
namespace {

constexpr std::uint64_t kMagic = 0x35306c74636e7268;  // "hrnctl05": changes with the protocol
// In the place of an address.
constexpr std::string_view kFailed = "failed: ";
// Who connects greets at once.
constexpr std::chrono::seconds kGreetingPatience{5};
// An address that leads nowhere, and a rank that is busy with others.
constexpr std::chrono::seconds kConnectPatience{10};
constexpr std::chrono::milliseconds kPauseBetweenRounds{200};

// Both ends send one. Plain data.
struct Greeting {
  std::uint64_t magic = 0;
  std::uint64_t nonce = 0;
  std::int64_t pid = 0;
  std::int32_t rank = -1;
  std::int32_t stream = 0;
  char host[64] = {};
  std::int32_t number = 0;  // what messages call it
  std::uint16_t door_port = 0;
  std::uint16_t unused = 0;
  std::uint64_t door_nonce = 0;
};

std::string describe(const Greeting& greeting) {
  return concat("rank ", greeting.number, " (pid ", greeting.pid, " on ",
                std::string(greeting.host, ::strnlen(greeting.host, sizeof greeting.host)), ')');
}

Greeting greet(std::uint64_t nonce, const Introduction& own) {
  Greeting greeting;
  greeting.magic = kMagic;
  greeting.nonce = nonce;
  greeting.pid = ::getpid();
  greeting.rank = own.rank;
  greeting.stream = own.stream;
  greeting.number = own.number;
  greeting.door_port = own.door.port;
  greeting.door_nonce = own.door.nonce;
  this_host().copy(greeting.host, sizeof greeting.host - 1);
  return greeting;
}

// The sooner of the two.
WaitContext within(std::chrono::milliseconds patience, const WaitContext& context) {
  const Deadline sooner = Deadline::after(patience);
  return {sooner.at() < context.deadline.at() ? sooner : context.deadline, context.check_interrupt};
}

RemotePeer make_peer(const Greeting& theirs, int stream, UniqueFd socket) {
  RemotePeer peer{theirs.rank, theirs.number, stream, describe(theirs), std::move(socket)};
  peer.door = {peer_address(peer.socket.get()), {theirs.door_nonce, theirs.door_port}};
  return peer;
}

void check_greeting(const Greeting& theirs, std::uint64_t nonce) {
  HORON_CHECK(theirs.magic == kMagic && theirs.nonce == nonce,
              "somebody else, not of this group, listens there");
}

// Who listens. Nothing for who connected and then changed its mind, or is nobody of this group.
std::optional<RemotePeer> welcome(UniqueFd socket, const Greeting& own, int n_ranks, int n_streams,
                                  const WaitContext& context) {
  Greeting theirs;
  try {
    set_up_connection(socket.get());
    receive_all(socket.get(), &theirs, sizeof theirs, context);
    check_greeting(theirs, own.nonce);
    HORON_CHECK(theirs.rank > own.rank && theirs.rank < n_ranks, "there is no rank ", theirs.rank,
                " that would connect here");
    HORON_CHECK(theirs.stream >= 0 && theirs.stream < n_streams, "there is no stream ",
                theirs.stream);
    send_all(socket.get(), &own, sizeof own, context);
    // It may have given up meanwhile, and be about to come again.
    char has_read = 0;
    receive_all(socket.get(), &has_read, sizeof has_read, context);
  } catch (const Error& error) {
    if (theirs.magic == kMagic && theirs.rank >= 0) {  // it speaks our language
      log_warning(concat("rank ", own.number, " refused a connection from ", describe(theirs), ": ",
                         error.what()));
    }
    return std::nullopt;
  }
  return make_peer(theirs, theirs.stream, std::move(socket));
}

// Who connects.
RemotePeer introduce(UniqueFd socket, const Greeting& own, int rank, const WaitContext& context) {
  set_up_connection(socket.get());
  send_all(socket.get(), &own, sizeof own, context);
  Greeting theirs;
  receive_all(socket.get(), &theirs, sizeof theirs, context);
  check_greeting(theirs, own.nonce);
  HORON_CHECK(theirs.rank == rank, "it is rank ", theirs.number);
  const char has_read = 1;
  send_all(socket.get(), &has_read, sizeof has_read, context);
  return make_peer(theirs, own.stream, std::move(socket));
}

// The first of the addresses that answers, or an empty UniqueFd.
UniqueFd connect_any(const std::vector<std::string>& addresses, std::uint16_t port,
                     const WaitContext& context) {
  std::vector<UniqueFd> sockets;
  for (const std::string& address : addresses) {
    if (UniqueFd socket = begin_connect(address, port)) {
      sockets.push_back(std::move(socket));
    }
  }
  while (!sockets.empty() && !context.deadline.has_passed()) {
    std::vector<pollfd> entries;
    entries.reserve(sockets.size());
    for (const UniqueFd& socket : sockets) {
      entries.push_back({socket.get(), POLLOUT, 0});
    }
    constexpr int kSlice = 200;  // milliseconds until Ctrl-C is looked for
    const int ready = ::poll(entries.data(), entries.size(), kSlice);
    HORON_CHECK(ready >= 0 || errno == EINTR, system_error_text("poll", errno));
    if (context.check_interrupt != nullptr) {
      (*context.check_interrupt)();
    }
    for (std::size_t i = sockets.size(); ready > 0 && i-- > 0;) {
      if (entries[i].revents == 0) {
        continue;
      }
      if (connect_error(sockets[i].get()) == 0) {
        return std::move(sockets[i]);
      }
      sockets.erase(sockets.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return UniqueFd();
}

}  // namespace

std::string Place::encode() const {
  std::string text = concat(nonce, ' ', port);
  for (const std::string& address : addresses) {
    text += ' ' + address;
  }
  return text;
}

Place Place::decode(const std::string& text, int number) {
  if (text.rfind(kFailed, 0) == 0) {
    throw UsageError(concat("rank ", number, " can not be reached: ", text.substr(kFailed.size())));
  }
  Place place;
  std::istringstream in(text);
  in >> place.nonce >> place.port;
  HORON_CHECK(!in.fail(), "rank ", number, "'s address in the store is damaged: '", text, "'");
  for (std::string address; in >> address;) {
    place.addresses.push_back(address);
  }
  HORON_CHECK(!place.addresses.empty(), "rank ", number, " has no address in the store: '", text,
              "'");
  return place;
}

std::string Place::describe() const {
  std::string text;
  for (const std::string& address : addresses) {
    text += concat(text.empty() ? "" : ", ", address, " port ", port);
  }
  return text;
}

Listener listen_for_peers(const std::string& interfaces) {
  Listener listener;
  listener.place.nonce = random_nonce();
  listener.place.addresses = own_addresses(interfaces);
  listener.socket = listen_tcp(&listener.place.port);
  return listener;
}

std::string failed_place(const std::string& reason) { return concat(kFailed, reason); }

RemotePeer reach(const Place& place, int rank, int number, const Introduction& own,
                 const WaitContext& context) {
  const Greeting greeting = greet(place.nonce, own);
  std::string last_problem = "no address answered";
  for (std::size_t round = 0; !context.deadline.has_passed(); ++round) {
    const WaitContext attempt = within(kConnectPatience, context);
    // All at once; then, as the one that answered was somebody else's, one after the other.
    std::vector<std::string> addresses = place.addresses;
    if (round > 0) {
      addresses = {place.addresses[round % place.addresses.size()]};
    }
    if (UniqueFd socket = connect_any(addresses, place.port, attempt)) {
      try {
        return introduce(std::move(socket), greeting, rank, attempt);
      } catch (const Error& error) {
        last_problem = error.what();
      }
    }
    if (context.check_interrupt != nullptr) {
      (*context.check_interrupt)();
    }
    std::this_thread::sleep_for(kPauseBetweenRounds);
  }
  throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(),
                            "ms for a connection to rank ", number, " (", place.describe(),
                            "): ", last_problem, ". HORON_IFACE on rank ", number,
                            " chooses the interface."));
}

std::vector<RemotePeer> receive_peers(const Listener& listener, const Introduction& own,
                                      const std::vector<int>& numbers, int n_streams,
                                      const WaitContext& context) {
  const int n_ranks = static_cast<int>(numbers.size());
  const int n_after = n_ranks - own.rank - 1;
  std::vector<RemotePeer> peers(static_cast<std::size_t>(n_after * n_streams));
  const auto place_of = [&](int rank, int stream) -> RemotePeer& {
    return peers[static_cast<std::size_t>(stream * n_after + rank - own.rank - 1)];
  };
  const Greeting greeting = greet(listener.place.nonce, own);
  for (std::size_t missing = peers.size(); missing > 0;) {
    if (!wait_for_socket(listener.socket.get(), POLLIN, context)) {
      std::vector<int> names;
      for (int rank = own.rank + 1; rank < n_ranks; ++rank) {
        bool is_complete = true;
        for (int stream = 0; stream < n_streams; ++stream) {
          is_complete = is_complete && place_of(rank, stream).socket;
        }
        if (!is_complete) {
          names.push_back(numbers[static_cast<std::size_t>(rank)]);
        }
      }
      throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(),
                                "ms for a connection from ", name_ranks(names),
                                ". Can they reach this host? HORON_IFACE chooses the interface."));
    }
    UniqueFd socket = accept_tcp(listener.socket.get());
    if (!socket) {
      continue;
    }
    if (auto peer = welcome(std::move(socket), greeting, n_ranks, n_streams,
                            within(kGreetingPatience, context))) {
      // A rank that was not answered in time comes again.
      RemotePeer& place = place_of(peer->rank, peer->stream);
      missing -= place.socket ? 0 : 1;
      place = std::move(*peer);
    }
  }
  return peers;
}

}  // namespace horon
