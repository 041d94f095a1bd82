#include "core/published_stream.h"

#include <cstring>
#include <random>

#include "catch.h"
#include "core/header.h"

using namespace horon;

namespace {

using Bytes = std::vector<std::byte>;

// n ranks, each with random bytes for each destination.
struct StreamExchange {
  int n;
  std::vector<std::vector<Bytes>> data;  // [source][destination]
  std::vector<Request> requests;
  std::vector<std::vector<std::uint64_t>> slots;
  std::vector<HeaderView> views;

  StreamExchange(int n_ranks, OpKind kind, std::size_t element, std::mt19937& random) : n(n_ranks) {
    const auto ranks = static_cast<std::size_t>(n);
    data.assign(ranks, std::vector<Bytes>(ranks));
    requests.resize(ranks);
    for (std::size_t source = 0; source < ranks; ++source) {
      const Bytes shared = random_bytes(random() % 40 * element, random);
      requests[source].kind = kind;
      requests[source].element_bytes = element;
      requests[source].recv_counts.resize(ranks);
      for (std::size_t destination = 0; destination < ranks; ++destination) {
        const bool is_empty = random() % 4 == 0;
        Bytes& part = data[source][destination];
        part = has_shared_input(kind)
                   ? shared
                   : random_bytes(is_empty ? 0 : random() % 40 * element, random);
        requests[source].inputs.push_back({part.data(), part.size()});
        requests[source].send_counts.push_back(part.size() / element);
      }
    }
    for (int rank = 0; rank < n; ++rank) {
      const Request& request = requests[static_cast<std::size_t>(rank)];
      slots.emplace_back(header_bytes(n) / 8);
      auto* slot = reinterpret_cast<std::byte*>(slots.back().data());
      write_header(slot, make_header(request, 0, rank, n), request, n);
      views.push_back(read_header(slot, n));
    }
  }

  static Bytes random_bytes(std::size_t size, std::mt19937& random) {
    Bytes bytes(size);
    for (std::byte& byte : bytes) {
      byte = static_cast<std::byte>(random());
    }
    return bytes;
  }
};

Bytes whole_stream(const PerRank<ConstSpan>& pieces) {
  Bytes stream;
  for (const ConstSpan& piece : pieces) {
    stream.insert(stream.end(), piece.data, piece.data + piece.bytes);
  }
  return stream;
}

}  // namespace

TEST_CASE("every reader finds its bytes in the published stream") {
  std::mt19937 random(20);
  for (int round = 0; round < 40; ++round) {
    for (const OpKind kind : {OpKind::kAllToAll, OpKind::kScatter, OpKind::kAllGather,
                              OpKind::kBroadcast, OpKind::kReduceScatter}) {
      for (int n = 1; n <= 5; ++n) {
        const std::size_t element = std::size_t{1} << (random() % 5);
        const StreamExchange exchange(n, kind, element, random);
        for (int source = 0; source < n; ++source) {
          const auto s = static_cast<std::size_t>(source);
          const Bytes stream = whole_stream(stream_pieces(exchange.requests[s], source, n));
          REQUIRE(stream.size() == published_bytes(exchange.requests[s], source, n));
          std::size_t sent_to_others = 0;
          for (int destination = 0; destination < n; ++destination) {
            if (destination == source) {
              continue;
            }
            const Bytes& expected = exchange.data[s][static_cast<std::size_t>(destination)];
            const StreamRange range = range_for(exchange.views, source, destination);
            REQUIRE(range.bytes == expected.size());
            REQUIRE(range.offset + range.bytes <= stream.size());
            REQUIRE(std::equal(expected.begin(), expected.end(),
                               stream.begin() + static_cast<std::ptrdiff_t>(range.offset)));
            sent_to_others =
                has_shared_input(kind) ? expected.size() : sent_to_others + expected.size();
          }
          REQUIRE(stream.size() == sent_to_others);  // nothing but what others read
        }
      }
    }
  }
}

TEST_CASE("a stream starts with the right neighbour's part") {
  std::mt19937 random(21);
  const StreamExchange exchange(4, OpKind::kAllToAll, 4, random);
  for (int source = 0; source < 4; ++source) {
    REQUIRE(range_for(exchange.views, source, (source + 1) % 4).offset == 0);
  }
}

TEST_CASE("reductions publish their one input, barriers nothing") {
  std::byte memory[24] = {};
  Request request;
  request.inputs = {{memory, sizeof memory}};
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kAllReduceCoalesced, OpKind::kReduce}) {
    request.kind = kind;
    REQUIRE(published_bytes(request, 1, 3) == sizeof memory);
    REQUIRE(stream_pieces(request, 1, 3)[0].data == memory);
  }
  request.kind = OpKind::kBarrier;
  REQUIRE(published_bytes(request, 1, 3) == 0);
}

TEST_CASE("copy_from_stream copies any part of a stream") {
  std::mt19937 random(22);
  const Bytes a = StreamExchange::random_bytes(5, random);
  const Bytes b = StreamExchange::random_bytes(11, random);
  const Bytes c = StreamExchange::random_bytes(1, random);
  const PerRank<ConstSpan> pieces = {{a.data(), a.size()}, {nullptr, 0}, {b.data(), b.size()},
                                     {nullptr, 0},         {nullptr, 0}, {c.data(), c.size()}};
  const Bytes stream = whole_stream(pieces);
  for (std::size_t offset = 0; offset <= stream.size() + 2; ++offset) {
    for (std::size_t bytes = 0; bytes <= stream.size() + 2; ++bytes) {
      Bytes copy(bytes + 1, std::byte{0x5a});
      const std::size_t there = offset < stream.size() ? stream.size() - offset : 0;
      const std::size_t expected = std::min(bytes, there);
      REQUIRE(copy_from_stream(pieces, offset, bytes, copy.data()) == expected);
      REQUIRE(std::memcmp(copy.data(), stream.data() + std::min(offset, stream.size()), expected) ==
              0);
      for (std::size_t i = expected; i < copy.size(); ++i) {
        REQUIRE(copy[i] == std::byte{0x5a});
      }
    }
  }
  REQUIRE(copy_from_stream({}, 0, 4, nullptr) == 0);
}
