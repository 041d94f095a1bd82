#include "cross/tcp_byte_transport.h"

#include <sys/socket.h>

#include "catch.h"
#include "cross/cross_transport.h"
#include "cross/full_meeting.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

std::vector<int> numbers_of(int n_ranks) {
  std::vector<int> numbers;
  for (int rank = 0; rank < n_ranks; ++rank) {
    numbers.push_back(10 + rank);
  }
  return numbers;
}

using Carriers = std::vector<std::shared_ptr<TcpByteTransport>>;

Carriers connect(int n_ranks) {
  Carriers carriers(static_cast<std::size_t>(n_ranks));
  MemoryStore store;
  require_no_errors(run_ranks(n_ranks, [&](int rank) {
    carriers[static_cast<std::size_t>(rank)] = std::make_shared<TcpByteTransport>(
        rank, n_ranks,
        std::move(meet_everybody(store, rank, numbers_of(n_ranks), 1, "lo", patient_context())[0]));
  }));
  return carriers;
}

Transports make_over_tcp(int n_ranks) {
  Transports transports;
  for (int rank = 0; const auto& carrier : connect(n_ranks)) {
    transports.by_rank.push_back(std::make_unique<CrossTransport>(carrier, rank++, n_ranks));
  }
  return transports;
}

// Gives every other rank, and gets from it, so many bytes.
void swap_bytes(ByteTransport& carrier, int n_ranks, std::size_t bytes,
                const WaitContext& context) {
  const std::vector<std::byte> sent(bytes, std::byte{7});
  std::vector<std::byte> received(bytes * static_cast<std::size_t>(n_ranks));
  ReceivedSpans to;
  for (std::size_t source = 0; source < static_cast<std::size_t>(n_ranks); ++source) {
    to.push_back({received.data() + source * bytes, bytes});
  }
  carrier.exchange(SentSpans(static_cast<std::size_t>(n_ranks), {sent.data(), bytes}), to, context);
}

}  // namespace

TEST_CASE("tcp bytes: everybody meets everybody, and has a name") {
  for (int n = 1; n <= 5; ++n) {
    MemoryStore store;
    require_no_errors(run_ranks(n, [&](int rank) {
      for (int time = 0; time < 2; ++time) {  // on one store
        const auto peers =
            std::move(meet_everybody(store, rank, numbers_of(n), 1, "lo", patient_context())[0]);
        expect(static_cast<int>(peers.size()) == n - 1, peers.size(), " peers of ", n - 1);
        for (int i = 0; i < n - 1; ++i) {
          const RemotePeer& peer = peers[static_cast<std::size_t>(i)];
          const int expected = i < rank ? i : i + 1;
          expect(peer.rank == expected, "rank ", peer.rank, " in the place of ", expected);
          expect(contains(peer.description, concat("rank ", 10 + expected, " (pid ")),
                 peer.description);
        }
      }
    }));
  }
}

TEST_CASE("tcp bytes: all kinds, dtypes and sizes") { test_all_kinds(make_over_tcp); }
TEST_CASE("tcp bytes: a mismatch fails one call and the next works") {
  test_mixed_with_mismatches(make_over_tcp);
}
TEST_CASE("tcp bytes: a refusal names the rank") { test_refusal_names_the_rank(make_over_tcp); }
TEST_CASE("tcp bytes: abort") { test_abort(make_over_tcp); }
TEST_CASE("tcp bytes: timeout") { test_timeout(make_over_tcp); }
TEST_CASE("tcp bytes: interrupt") { test_interrupt(make_over_tcp); }

TEST_CASE("tcp bytes: more than the sockets hold, both ways at once") {
  const int n = 3;
  const Carriers carriers = connect(n);
  require_no_errors(run_ranks(n, [&](int rank) {
    for (const std::size_t bytes :
         {std::size_t{12} << 20, std::size_t{1}, std::size_t{0}, (std::size_t{5} << 20) + 3}) {
      std::vector<std::vector<std::byte>> sent;
      std::vector<std::vector<std::byte>> received;
      SentSpans send;
      ReceivedSpans receive;
      const auto value = [&](int source, int destination, std::size_t at) {
        return static_cast<std::byte>(at * 7 + at / 1000 +
                                      static_cast<std::size_t>(source * 3 + destination));
      };
      // Each pair has a size of its own, in each direction.
      const auto size = [&](int source, int destination) {
        return bytes / static_cast<std::size_t>(1 + source + 2 * destination);
      };
      for (int peer = 0; peer < n; ++peer) {
        sent.emplace_back(size(rank, peer));
        received.emplace_back(size(peer, rank));
        for (std::size_t at = 0; at < sent.back().size(); ++at) {
          sent.back()[at] = value(rank, peer, at);
        }
        send.push_back({sent.back().data(), sent.back().size()});
        receive.push_back({received.back().data(), received.back().size()});
      }
      carriers[static_cast<std::size_t>(rank)]->exchange(send, receive, patient_context());
      for (int peer = 0; peer < n; ++peer) {
        const auto& from = received[static_cast<std::size_t>(peer)];
        for (std::size_t at = 0; peer != rank && at < from.size(); ++at) {
          expect(from[at] == value(peer, rank, at), "byte ", at, " from ", peer);
        }
      }
    }
  }));
}

TEST_CASE("tcp bytes: a peer that goes is named, and what it had sent has come") {
  Carriers carriers = connect(2);
  const Errors errors = run_ranks(2, [&](int rank) {
    auto& carrier = carriers[static_cast<std::size_t>(rank)];
    swap_bytes(*carrier, 2, 1000, patient_context());
    if (rank == 1) {
      carrier.reset();
      return;
    }
    swap_bytes(*carrier, 2, 1000, patient_context());
  });
  REQUIRE(!errors[1]);
  REQUIRE(threw<PeerLostError>(errors[0]));
  REQUIRE(contains(text_of(errors[0]), "rank 11 (pid "));
  REQUIRE(contains(text_of(errors[0]), "closed its connection"));
}

TEST_CASE("tcp bytes: a timeout names whom it waited for, and only those") {
  const Carriers carriers = connect(3);
  const Errors errors = run_ranks(3, [&](int rank) {
    if (rank == 2) {
      return;
    }
    swap_bytes(*carriers[static_cast<std::size_t>(rank)], 3, 10,
               {after_the_others_came(), nullptr});
  });
  for (int rank = 0; rank < 2; ++rank) {
    const std::string text = text_of(errors[static_cast<std::size_t>(rank)]);
    INFO(text);
    REQUIRE(threw<TimeoutError>(errors[static_cast<std::size_t>(rank)]));
    REQUIRE(contains(text, "ms for rank 12 (pid "));
    REQUIRE_FALSE(contains(text, rank == 0 ? "rank 11" : "rank 10"));
  }
}

TEST_CASE("tcp bytes: other sizes than expected are an error, not other bytes") {
  const Carriers carriers = connect(2);
  const Errors errors = run_ranks(2, [&](int rank) {
    swap_bytes(*carriers[static_cast<std::size_t>(rank)], 2, rank == 0 ? 8 : 12, patient_context());
  });
  REQUIRE((errors[0] || errors[1]));
  for (const std::exception_ptr& error : errors) {
    if (error) {
      REQUIRE(threw<GroupError>(error));
      REQUIRE(contains(text_of(error), "were expected"));
    }
  }
}
