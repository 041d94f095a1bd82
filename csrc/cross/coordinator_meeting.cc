#include "cross/coordinator_meeting.h"

#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "core/random_nonce.h"
#include "cross/tcp_socket.h"

namespace horon {
namespace {

constexpr std::uint64_t kMagic = 0x33306c74636e7268;  // "hrnctl03": changes with the protocol
// In the place of rank 0's address.
constexpr std::string_view kFailed = "failed: ";
// Who connects greets at once.
constexpr std::chrono::seconds kGreetingPatience{5};
// An address that leads nowhere, and a rank 0 that is busy with others.
constexpr std::chrono::seconds kConnectPatience{10};
constexpr std::chrono::milliseconds kPauseBetweenRounds{200};

// Both ends send one. Plain data.
struct Greeting {
  std::uint64_t magic = 0;
  std::uint64_t nonce = 0;
  std::int64_t pid = 0;
  std::int32_t rank = -1;
  char host[64] = {};
  std::int32_t number = 0;  // what messages call it
};

std::string describe(const Greeting& greeting) {
  return concat("rank ", greeting.number, " (pid ", greeting.pid, " on ",
                std::string(greeting.host, ::strnlen(greeting.host, sizeof greeting.host)), ')');
}

// What rank 0 puts into the store, one line, so that a person can read it.
struct Place {
  std::uint64_t nonce = 0;
  std::uint16_t port = 0;
  std::vector<std::string> addresses;

  std::string encode() const {
    std::string text = concat(nonce, ' ', port);
    for (const std::string& address : addresses) {
      text += ' ' + address;
    }
    return text;
  }

  static Place decode(const std::string& text) {
    Place place;
    std::istringstream in(text);
    in >> place.nonce >> place.port;
    HORON_CHECK(!in.fail(), "rank 0's address in the store is damaged: '", text, "'");
    for (std::string address; in >> address;) {
      place.addresses.push_back(address);
    }
    HORON_CHECK(!place.addresses.empty(), "rank 0 has no address in the store: '", text, "'");
    return place;
  }

  std::string describe() const {
    std::string text;
    for (const std::string& address : addresses) {
      text += concat(text.empty() ? "" : ", ", address, " port ", port);
    }
    return text;
  }
};

int number_of(int rank, const std::vector<int>& numbers) {
  const auto index = static_cast<std::size_t>(rank);
  return index < numbers.size() ? numbers[index] : rank;
}

Greeting own_greeting(std::uint64_t nonce, int rank, const std::vector<int>& numbers) {
  Greeting greeting;
  greeting.magic = kMagic;
  greeting.nonce = nonce;
  greeting.pid = ::getpid();
  greeting.rank = rank;
  greeting.number = number_of(rank, numbers);
  ::gethostname(greeting.host, sizeof greeting.host - 1);
  return greeting;
}

// The sooner of the two.
WaitContext within(std::chrono::milliseconds patience, const WaitContext& context) {
  const Deadline sooner = Deadline::after(patience);
  return {sooner.at() < context.deadline.at() ? sooner : context.deadline, context.check_interrupt};
}

void check_greeting(const Greeting& theirs, std::uint64_t nonce) {
  HORON_CHECK(theirs.magic == kMagic && theirs.nonce == nonce,
              "somebody else, not of this group, listens there");
}

// On rank 0. Nothing for who connected and then changed its mind, or is nobody of this group.
std::optional<RemotePeer> welcome(UniqueFd socket, const Greeting& own, int n_ranks,
                                  const WaitContext& context) {
  Greeting theirs;
  try {
    set_up_connection(socket.get());
    receive_all(socket.get(), &theirs, sizeof theirs, context);
    check_greeting(theirs, own.nonce);
    HORON_CHECK(theirs.rank > 0 && theirs.rank < n_ranks, "there is no rank ", theirs.rank);
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
  return RemotePeer{theirs.rank, theirs.number, describe(theirs), std::move(socket)};
}

// On the others.
RemotePeer introduce(UniqueFd socket, const Greeting& own, const WaitContext& context) {
  set_up_connection(socket.get());
  send_all(socket.get(), &own, sizeof own, context);
  Greeting theirs;
  receive_all(socket.get(), &theirs, sizeof theirs, context);
  check_greeting(theirs, own.nonce);
  HORON_CHECK(theirs.rank == 0, "it is rank ", theirs.rank);
  const char has_read = 1;
  send_all(socket.get(), &has_read, sizeof has_read, context);
  return {0, theirs.number, describe(theirs), std::move(socket)};
}

std::vector<RemotePeer> receive_everybody(int listener, std::uint64_t nonce, int n_ranks,
                                          const std::vector<int>& numbers,
                                          const WaitContext& context) {
  std::vector<RemotePeer> peers(static_cast<std::size_t>(n_ranks));
  const Greeting own = own_greeting(nonce, 0, numbers);
  for (int missing = n_ranks - 1; missing > 0;) {
    if (!wait_for_socket(listener, POLLIN, context)) {
      std::string names;
      for (int rank = 1; rank < n_ranks; ++rank) {
        if (!peers[static_cast<std::size_t>(rank)].socket) {
          names += concat(names.empty() ? "" : ", ", number_of(rank, numbers));
        }
      }
      throw TimeoutError(concat("Timed out waiting ", context.deadline.timeout().count(),
                                "ms for a connection from rank(s) ", names,
                                ". Can they reach this host? HORON_IFACE chooses the interface."));
    }
    UniqueFd socket = accept_tcp(listener);
    if (!socket) {
      continue;
    }
    if (auto peer = welcome(std::move(socket), own, n_ranks, within(kGreetingPatience, context))) {
      // A rank that was not answered in time comes again.
      RemotePeer& place = peers[static_cast<std::size_t>(peer->rank)];
      missing -= place.socket ? 0 : 1;
      place = std::move(*peer);
    }
  }
  peers.erase(peers.begin());
  return peers;
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

RemotePeer reach_coordinator(const Place& place, int rank, const std::vector<int>& numbers,
                             const WaitContext& context) {
  const Greeting own = own_greeting(place.nonce, rank, numbers);
  const int coordinator = number_of(0, numbers);
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
        return introduce(std::move(socket), own, attempt);
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
                            "ms for a connection to rank ", coordinator, " (", place.describe(),
                            "): ", last_problem, ". HORON_IFACE on rank ", coordinator,
                            " chooses the interface."));
}

}  // namespace

std::vector<RemotePeer> meet_coordinator(Store& store, int rank, int n_ranks,
                                         const std::string& interfaces, const WaitContext& context,
                                         const std::vector<int>& numbers) {
  // Keys are never used twice: each rank counts its own meetings.
  const std::int64_t generation = store.add(concat("horon/meeting/", rank), 1);
  const std::string key = concat("horon/meeting/", generation, "/coordinator");
  if (rank == 0) {
    Place place;
    UniqueFd listener;
    try {
      place.nonce = random_nonce();
      place.addresses = own_addresses(interfaces);
      listener = listen_tcp(&place.port);
    } catch (const Error& error) {
      store.set(key, concat(kFailed, error.what()));  // or the others would wait until the deadline
      throw;
    }
    store.set(key, place.encode());
    return receive_everybody(listener.get(), place.nonce, n_ranks, numbers, context);
  }
  const std::string text = store.get(key, context.deadline);
  if (text.rfind(kFailed, 0) == 0) {
    throw UsageError(concat("rank ", number_of(0, numbers),
                            " can not be reached: ", text.substr(kFailed.size())));
  }
  const Place place = Place::decode(text);
  std::vector<RemotePeer> peers;
  peers.push_back(reach_coordinator(place, rank, numbers, context));
  return peers;
}

}  // namespace horon
