#include <sys/socket.h>

#include <algorithm>

#include "catch.h"
#include "cross/full_meeting.h"
#include "p2p_endpoint.h"
#include "thread_activity.h"

using namespace horon;
using namespace horon::testing;

namespace {

// Ranks of which each has a host, in this process; connected over loopback.
class Hosts {
 public:
  // `host_of`: by rank, from 0 on.
  explicit Hosts(const std::vector<int>& host_of,
                 const std::function<void(int rank, const std::string& reason)>& on_end = {})
      : n_ranks_(static_cast<int>(host_of.size())) {
    std::vector<int> numbers;
    std::vector<int> local;  // by rank, on its host
    for (const int host : host_of) {
      sizes_.resize(std::max(sizes_.size(), static_cast<std::size_t>(host) + 1), 0);
      numbers.push_back(static_cast<int>(numbers.size()));
      local.push_back(sizes_[static_cast<std::size_t>(host)]++);
    }
    for (const int size : sizes_) {
      groups_.push_back(std::make_unique<LocalGroup>(size));
    }
    std::vector<std::vector<RemotePeer>> peers(host_of.size());
    MemoryStore store;
    require_no_errors(run_ranks(n_ranks_, [&](int rank) {
      auto streams = meet_everybody(store, rank, numbers, 2, "lo", patient_context());
      expect(streams.size() == 2 && streams[0].size() == host_of.size() - 1, "connections lack");
      peers[static_cast<std::size_t>(rank)] = std::move(streams[1]);
    }));
    for (int rank = 0; rank < n_ranks_; ++rank) {
      const auto own = static_cast<std::size_t>(rank);
      P2pRoster roster;
      roster.rank = rank;
      if (on_end) {
        roster.on_end = [on_end, rank](const std::string& reason) { on_end(rank, reason); };
      }
      for (std::size_t peer = 0; peer < host_of.size(); ++peer) {
        roster.local.push_back(host_of[peer] == host_of[own] ? local[peer] : -1);
      }
      for (RemotePeer& peer : peers[own]) {
        expect(peer.stream == 1, "a connection of another stream");
        if (roster.local[static_cast<std::size_t>(peer.rank)] < 0) {
          sockets_.push_back({rank, peer.rank, peer.socket.get()});
          roster.remote.push_back(std::move(peer));
        }
      }
      endpoints_.push_back(std::make_unique<Endpoint>(
          *groups_[static_cast<std::size_t>(host_of[own])], local[own], std::move(roster)));
    }
  }

  int n_ranks() const { return n_ranks_; }
  Endpoint& operator[](int rank) { return *endpoints_[static_cast<std::size_t>(rank)]; }
  // Closes the engine, and its connections with it.
  void leave(int rank, const Deadline& drain_until = patient()) {
    endpoints_[static_cast<std::size_t>(rank)]->engine().close(drain_until, "it leaves");
    endpoints_[static_cast<std::size_t>(rank)].reset();
  }
  // As the system does for a process that dies.
  void cut(int rank) {
    for (const Socket& socket : sockets_) {
      if (socket.rank == rank) {
        ::shutdown(socket.fd, SHUT_RDWR);
      }
    }
  }
  // Past the engine.
  void say(int rank, int to, const Frame& frame) {
    for (const Socket& socket : sockets_) {
      if (socket.rank == rank && socket.peer == to) {
        REQUIRE(::send(socket.fd, &frame, sizeof frame, 0) == sizeof frame);
      }
    }
  }
  LocalGroup& group(std::size_t host) { return *groups_[host]; }

 private:
  struct Socket {
    int rank;
    int peer;
    int fd;
  };

  const int n_ranks_;
  std::vector<int> sizes_;
  std::vector<std::unique_ptr<LocalGroup>> groups_;
  std::vector<Socket> sockets_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

// Both ends of a connection over loopback, with what messages need of it.
std::vector<RemotePeer> connected_pair() {
  std::vector<RemotePeer> ends(2);
  MemoryStore store;
  require_no_errors(run_ranks(2, [&](int rank) {
    ends[static_cast<std::size_t>(rank)] =
        std::move(meet_everybody(store, rank, {0, 1}, 1, "lo", patient_context())[0][0]);
  }));
  return ends;
}

// Around what goes at once and around the parts in which the rest goes.
constexpr std::size_t kNetworkSizes[] = {0,     1,       4096,    65535,   65536,
                                         65537, 1000000, 1 << 20, 3000001, 10 << 20};

}  // namespace

TEST_CASE("p2p hosts: messages of all sizes, send first and receive first") {
  Hosts hosts({0, 1});
  unsigned seed = 0;
  for (const bool send_first : {true, false}) {
    for (const std::size_t bytes : kNetworkSizes) {
      INFO(bytes << " bytes, send first: " << send_first);
      std::unique_ptr<Pending> sent;
      std::unique_ptr<Pending> received;
      if (send_first) {
        sent = hosts[0].send(1, 5, message(++seed, bytes));
        received = hosts[1].receive(0, 5, bytes);
      } else {
        received = hosts[1].receive(0, 5, bytes);
        sent = hosts[0].send(1, 5, message(++seed, bytes));
      }
      REQUIRE_NOTHROW(received->finish());
      REQUIRE_NOTHROW(sent->finish());
      REQUIRE(received->data() == message(seed, bytes));
      REQUIRE(received->source() == 0);
    }
  }
}

TEST_CASE("p2p hosts: matching is by tag, in the order of sending within a tag") {
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{2000000}}) {
    Hosts hosts({0, 1});
    std::vector<std::unique_ptr<Pending>> sends;
    for (unsigned i = 0; i < 6; ++i) {
      sends.push_back(hosts[0].send(1, static_cast<int>(i % 2), message(i, bytes)));
    }
    for (const unsigned i : {1U, 3U, 0U, 5U, 2U, 4U}) {
      const auto received = hosts[1].receive(0, static_cast<int>(i % 2), bytes);
      REQUIRE_NOTHROW(received->finish());
      REQUIRE(received->data() == message(i, bytes));
    }
    for (const auto& sent : sends) {
      REQUIRE_NOTHROW(sent->finish());
    }
  }
}

TEST_CASE("p2p hosts: a receive from any source takes what comes from either kind of rank") {
  Hosts hosts({0, 0, 1, 1});
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{300000}}) {
    for (int source = 0; source < 4; ++source) {
      const auto received = hosts[1].receive(kAnySource, 3, bytes);
      const auto sent = hosts[source].send(1, 3, message(7, bytes));
      REQUIRE_NOTHROW(received->finish());
      REQUIRE_NOTHROW(sent->finish());
      REQUIRE(received->source() == source);
      REQUIRE(received->data() == message(7, bytes));
    }
  }
}

TEST_CASE("p2p hosts: different sizes fail both ends, and later messages work") {
  Hosts hosts({0, 1});
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{200000}}) {
    for (const bool send_first : {true, false}) {
      std::unique_ptr<Pending> sent;
      if (send_first) {
        sent = hosts[0].send(1, 0, message(1, bytes));
      }
      const auto received = hosts[1].receive(0, 0, bytes + 1);
      if (!send_first) {
        sent = hosts[0].send(1, 0, message(1, bytes));
      }
      REQUIRE(threw<MismatchError>(received->error()));
      REQUIRE(threw<MismatchError>(sent->error()));
      const auto next = hosts[1].receive(0, 0, bytes);
      REQUIRE_NOTHROW(hosts[0].send(1, 0, message(2, bytes))->finish());
      REQUIRE_NOTHROW(next->finish());
      REQUIRE(next->data() == message(2, bytes));
    }
  }
}

TEST_CASE("p2p hosts: many messages in all directions at once") {
  Hosts hosts({0, 0, 1, 2});
  constexpr unsigned kMessages = 60;
  const auto size_of = [](unsigned i) {
    return std::size_t{i % 7 == 0 ? 400000U : i % 3 == 0 ? 70000U : i * 40U};
  };
  const auto seed_of = [](int source, int destination, unsigned i) {
    return static_cast<unsigned>(source * 4 + destination) * 1000 + i;
  };
  const bool helps = GENERATE(false, true);
  require_no_errors(run_ranks(hosts.n_ranks(), [&](int rank) {
    Endpoint& own = hosts[rank];
    std::vector<std::unique_ptr<Pending>> all;
    std::vector<std::pair<Pending*, unsigned>> receives;
    for (unsigned i = 0; i < kMessages; ++i) {
      for (int peer = 0; peer < hosts.n_ranks(); ++peer) {
        all.push_back(
            own.send(peer, static_cast<int>(i % 3), message(seed_of(rank, peer, i), size_of(i))));
        all.push_back(own.receive(peer, static_cast<int>(i % 3), size_of(i)));
        receives.emplace_back(all.back().get(), seed_of(peer, rank, i));
      }
    }
    for (const auto& pending : all) {
      helps ? pending->help(own.engine()) : pending->finish();
    }
    for (const auto& [pending, seed] : receives) {
      expect(pending->data() == message(seed, pending->data().size()), "a message is damaged");
    }
  }));
}

TEST_CASE("p2p hosts: an unreceived large message blocks nobody") {
  Hosts hosts({0, 1});
  const auto large = hosts[0].send(1, 1, message(1, 20 << 20));
  for (unsigned i = 0; i < 100; ++i) {
    const auto small = hosts[0].send(1, 2, message(i, 400));
    const auto received = hosts[1].receive(0, 2, 400);
    REQUIRE_NOTHROW(received->finish());
    REQUIRE_NOTHROW(small->finish());
  }
  REQUIRE_FALSE(large->is_done());
  const auto received = hosts[1].receive(0, 1, 20 << 20);
  REQUIRE_NOTHROW(received->finish());
  REQUIRE_NOTHROW(large->finish());
  REQUIRE(received->data() == message(1, 20 << 20));
}

TEST_CASE("p2p hosts: who sleeps is woken by a socket, and by a rank of its host") {
  Hosts hosts({0, 0, 1});
  for (const int source : {2, 0, 2}) {
    require_no_errors(run_ranks(2, [&](int which) {
      if (which == 0) {
        const auto received = hosts[1].receive(source, 0, 100000);
        received->help(hosts[1].engine());
        expect(received->data() == message(9, 100000), "damaged");
      } else {
        // Longer than anybody stays awake.
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        hosts[source].send(1, 0, message(9, 100000))->help(hosts[source].engine());
      }
    }));
  }
}

TEST_CASE("p2p hosts: a wait in a system call costs nothing") {
  Hosts hosts({0, 1});
  std::promise<long> waiter;
  std::future<long> id = waiter.get_future();
  require_no_errors(run_ranks(2, [&](int which) {
    if (which == 0) {
      waiter.set_value(current_thread_id());
      hosts[0].receive(1, 0, 8)->help(hosts[0].engine());
      return;
    }
    const long thread = id.get();
    const long before = voluntary_switches(thread);
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    const long wakes = voluntary_switches(thread) - before;
    hosts[1].send(0, 0, message(1, 8))->finish();
    // One each 50 ms to look around, and what it does before it sleeps for the first time.
    expect(wakes < 200, "woke ", wakes, " times in a second");
  }));
}

TEST_CASE("p2p hosts: a rank that leaves is told from one that dies") {
  Hosts hosts({0, 0, 1});
  SECTION("leaves: what it has sent before still arrives") {
    const auto sent = hosts[2].send(0, 0, message(4, 2 << 20));
    const auto received = hosts[0].receive(2, 0, 2 << 20);
    const auto more = hosts[0].receive(2, 1, 8);
    hosts[2].engine().close(patient(), "it goes");
    REQUIRE_NOTHROW(sent->finish());
    REQUIRE_NOTHROW(received->finish());
    REQUIRE(received->data() == message(4, 2 << 20));
    const std::string text = text_of(more->error());
    INFO(text);
    REQUIRE(contains(text, "rank 2 (pid "));
    REQUIRE(contains(text, "left the group"));
  }
  SECTION("leaves with messages that it has not received") {
    constexpr int kMessages = 40;
    const auto to_it = hosts[0].send(2, 7, message(1, 50000));
    std::vector<std::unique_ptr<Pending>> sends;
    for (unsigned i = 0; i < kMessages; ++i) {
      sends.push_back(hosts[2].send(0, 0, message(i, 60000)));
    }
    std::thread leaving([&] { hosts.leave(2); });
    for (unsigned i = 0; i < kMessages; ++i) {
      const auto received = hosts[0].receive(2, 0, 60000);
      CHECK_NOTHROW(received->finish());
      CHECK(received->data() == message(i, 60000));
    }
    leaving.join();
    for (const auto& sent : sends) {
      CHECK_NOTHROW(sent->finish());
    }
  }
  SECTION("dies") {
    const auto from_it = hosts[0].receive(2, 0, 8);
    const auto from_any = hosts[0].receive(kAnySource, 1, 8);
    const auto large = hosts[1].send(2, 0, message(4, 50 << 20));
    hosts.cut(2);
    for (Pending* pending : {from_it.get(), from_any.get(), large.get()}) {
      const std::exception_ptr error = pending->error();
      REQUIRE(threw<PeerLostError>(error));
      INFO(text_of(error));
      REQUIRE(contains(text_of(error), "rank 2 (pid "));
      REQUIRE(contains(text_of(error), "died"));
    }
    // Ranks that are still there go on.
    const auto received = hosts[0].receive(1, 0, 8);
    REQUIRE_NOTHROW(hosts[1].send(0, 0, message(5, 8))->finish());
    REQUIRE_NOTHROW(received->finish());
  }
}

TEST_CASE("p2p hosts: a timeout ends the group for all, and says why") {
  Hosts hosts({0, 1, 2});
  const auto pending = hosts[2].receive(1, 0, 8);
  const auto late = hosts[0].receive(1, 0, 8, soon());
  REQUIRE(threw<TimeoutError>(late->error()));
  const std::string text = text_of(pending->error());
  INFO(text);
  REQUIRE(contains(text, "rank 0: recv of 8 bytes from rank 1, tag 0 timed out"));
}

TEST_CASE("p2p hosts: a small send without a receive is done only when it is with its peer") {
  Hosts hosts({0, 1});
  // More than the systems keep for a rank that looks at nothing.
  constexpr int kMessages = 60;
  constexpr std::size_t kBytes = 60000;
  std::vector<std::unique_ptr<Pending>> sends;
  for (unsigned i = 0; i < kMessages; ++i) {
    sends.push_back(hosts[0].send(1, 0, message(i, kBytes)));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  const auto n_done = static_cast<unsigned>(
      std::count_if(sends.begin(), sends.end(), [](const auto& sent) { return sent->is_done(); }));
  REQUIRE(n_done >= 1);
  hosts.leave(0, soon());
  for (unsigned i = 0; i < n_done; ++i) {
    INFO(i << " of " << n_done);
    REQUIRE_NOTHROW(sends[i]->finish());
    const auto received = hosts[1].receive(0, 0, kBytes);
    REQUIRE_NOTHROW(received->finish());
    REQUIRE(received->data() == message(i, kBytes));
  }
}

TEST_CASE("p2p hosts: what ends the group is told to whoever runs collectives") {
  std::promise<std::string> told;
  Hosts hosts({0, 1}, [&](int rank, const std::string& reason) {
    if (rank == 1) {
      told.set_value(reason);
    }
  });
  const auto pending = hosts[1].receive(0, 1, 8);  // or it would look at the next operation
  const auto late = hosts[0].receive(1, 0, 8, soon());
  REQUIRE(threw<TimeoutError>(late->error()));
  std::future<std::string> reason = told.get_future();
  REQUIRE(reason.wait_until(patient().at()) == std::future_status::ready);
  const std::string text = reason.get();
  INFO(text);
  REQUIRE(contains(text, "rank 0: recv of 8 bytes from rank 1, tag 0 timed out"));
}

TEST_CASE("p2p hosts: an abort reaches the others with its reason") {
  Hosts hosts({0, 0, 1});
  const auto pending = hosts[0].receive(2, 0, 8);
  hosts[2].engine().abort("somebody had enough");
  hosts[2].engine().close(soon(), "somebody had enough");
  const std::string text = text_of(pending->error());
  INFO(text);
  REQUIRE(contains(text, "somebody had enough"));
  // Also to those that share memory with it.
  const std::string next = text_of(error_of([&] { hosts[1].receive(0, 0, 8)->finish(); }));
  INFO(next);
  REQUIRE(contains(next, "somebody had enough"));
}

TEST_CASE("p2p hosts: a connection that ends without its process is not called a death") {
  Hosts hosts({0, 1});
  const auto from_it = hosts[0].receive(1, 0, 8);
  const auto from_any = hosts[0].receive(kAnySource, 1, 8);
  Frame frame;
  frame.payload_bytes = std::uint64_t{1} << 40;
  hosts.say(1, 0, frame);
  for (Pending* pending : {from_it.get(), from_any.get()}) {
    const std::string text = text_of(pending->error());
    INFO(text);
    REQUIRE(contains(text, "can not be reached any more (it sent 1099511627776 bytes"));
    REQUIRE_FALSE(contains(text, "died"));
  }
}

TEST_CASE("p2p hosts: what is no message of ours ends the connection") {
  std::vector<RemotePeer> ends = connected_pair();
  MessageSocket socket(std::move(ends[0]));
  struct Nothing final : MessageSink {
    void on_frame(int, const Frame&, const std::byte*) override {}
    std::byte* place_of(int, const Frame&) override { return nullptr; }
    void on_data(int, const Frame&) override {}
  } sink;
  Frame frame;
  frame.payload_bytes = std::uint64_t{1} << 40;
  REQUIRE(::send(ends[1].socket.get(), &frame, sizeof frame, 0) == sizeof frame);
  while (!socket.receive(sink)) {
  }
  REQUIRE(socket.state() == MessageSocket::State::kLost);
  REQUIRE(contains(socket.why_lost(), "1099511627776 bytes"));
}

TEST_CASE("p2p hosts: parts for a receive that has failed are dropped, and the next is found") {
  std::vector<RemotePeer> ends = connected_pair();
  const auto from = std::make_unique<MessageSocket>(std::move(ends[0]));
  const auto to = std::make_unique<MessageSocket>(std::move(ends[1]));
  struct Sink final : MessageSink {
    void on_frame(int, const Frame& frame, const std::byte* payload) override {
      eager.assign(payload, payload + frame.payload_bytes);
    }
    std::byte* place_of(int, const Frame&) override { return nullptr; }
    void on_data(int, const Frame&) override { ++n_parts; }
    Bytes eager;
    int n_parts = 0;
  } sink;
  Frame part;
  part.type = FrameType::kData;
  const Bytes data = message(1, 500000);
  part.payload_bytes = data.size();
  from->put_stream(part, data.data());
  while (!from->is_flushed()) {
    from->flush();
    to->receive(sink);
  }
  const Bytes small = message(2, 70000);
  Frame eager;
  eager.payload_bytes = small.size();
  from->put(eager, small.data());
  while (sink.eager.empty()) {
    from->flush();
    to->receive(sink);
  }
  REQUIRE(sink.n_parts == 1);
  REQUIRE(sink.eager == small);
  SECTION("also where the sender has given it up half-way") {
    sink.eager.clear();
    auto given_up = std::make_unique<Bytes>(message(3, 20 << 20));
    part.payload_bytes = given_up->size();
    from->put_stream(part, given_up->data());
    while (from->flush()) {
    }
    REQUIRE_FALSE(from->is_flushed());
    from->keep_stream();
    given_up.reset();
    from->put(eager, small.data());
    while (sink.eager.empty()) {
      from->flush();
      to->receive(sink);
    }
    REQUIRE(sink.n_parts == 2);
    REQUIRE(sink.eager == small);
  }
}
