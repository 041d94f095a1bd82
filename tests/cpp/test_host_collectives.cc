#include "cross/host_collectives.h"

#include <map>

#include "catch.h"
#include "cross/cross_transport.h"
#include "fake_bytes.h"
#include "shm/shm_transport.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

// Which host each of n ranks is on.
using Hosts = std::vector<int> (*)(int n_ranks);

std::vector<int> pairs(int n) {
  std::vector<int> hosts;
  for (int rank = 0; rank < n; ++rank) {
    hosts.push_back(rank / 2);
  }
  return hosts;
}

std::vector<int> in_turn(int n) {
  std::vector<int> hosts;
  for (int rank = 0; rank < n; ++rank) {
    hosts.push_back(rank % 2);
  }
  return hosts;
}

std::vector<int> last_alone(int n) {
  std::vector<int> hosts(static_cast<std::size_t>(n), 0);
  hosts.back() = 1;
  return hosts;
}

// The ranks of each host share a segment, those of each column a fake network.
struct Cluster {
  std::map<std::size_t, std::unique_ptr<LocalGroup>> hosts;
  std::map<std::size_t, std::shared_ptr<Exchange>> columns;
};

Transports make_on(const std::vector<int>& host_numbers, const Options& options = small_options()) {
  const int n = static_cast<int>(host_numbers.size());
  const auto cluster = std::make_shared<Cluster>();
  const auto flat = std::make_shared<Exchange>(n);
  Transports transports;
  transports.shared = cluster;
  for (int rank = 0; rank < n; ++rank) {
    HostCollectives::Parts parts;
    parts.layout = lay_out(host_numbers, rank);
    parts.part_bytes = 16384;  // so that some tensors take several rounds
    const HostLayout& layout = parts.layout;
    std::unique_ptr<HostCollectives> collectives;
    if (has_neighbours(layout)) {
      auto& local = cluster->hosts[layout.own_host];
      if (layout.neighbours().size() > 1) {
        if (!local) {
          local =
              std::make_unique<LocalGroup>(static_cast<int>(layout.neighbours().size()), options);
        }
        const int index = static_cast<int>(layout.own_index);
        parts.local =
            std::make_unique<ShmTransport>(local->segment(index), local->peers(index), nullptr);
      }
      if (layout.is_in_column()) {
        auto& column = cluster->columns[layout.own_index];
        if (!column) {
          column = std::make_shared<Exchange>(static_cast<int>(layout.n_hosts()));
        }
        parts.column = std::make_shared<FakeByteTransport>(
            column, static_cast<int>(layout.own_host), static_cast<int>(layout.n_hosts()));
      }
      collectives = std::make_unique<HostCollectives>(std::move(parts));
    }
    transports.by_rank.push_back(std::make_unique<CrossTransport>(
        std::make_shared<FakeByteTransport>(flat, rank, n), rank, n, std::move(collectives)));
  }
  return transports;
}

Make maker(Hosts hosts) {
  return [hosts](int n) { return make_on(hosts(n)); };
}

const std::vector<Make>& makers() {
  static const std::vector<Make> all{maker(pairs), maker(in_turn), maker(last_alone)};
  return all;
}

}  // namespace

TEST_CASE("hosts: layouts") {
  const HostLayout layout = lay_out({7, 3, 7, 3, 3, 9}, 4);
  REQUIRE(layout.hosts == std::vector<std::vector<int>>{{0, 2}, {1, 3, 4}, {5}});
  REQUIRE(layout.host_of == std::vector<std::size_t>{0, 1, 0, 1, 1, 2});
  REQUIRE(layout.own_host == 1);
  REQUIRE(layout.own_index == 2);
  REQUIRE(layout.own_rank() == 4);
  REQUIRE(layout.n_columns == 1);
  REQUIRE_FALSE(layout.is_in_column());
  REQUIRE(layout.is_neighbour(3));
  REQUIRE_FALSE(layout.is_neighbour(2));
  REQUIRE(has_neighbours(layout));
  REQUIRE_FALSE(has_neighbours(lay_out({0, 0, 0}, 1)));
  REQUIRE_FALSE(has_neighbours(lay_out({0, 1, 2}, 1)));
  REQUIRE(lay_out({0, 0, 1, 1, 1}, 0).n_columns == 2);
}

TEST_CASE("hosts: parts are all of it, and differ by one at most") {
  for (const std::uint64_t count : {0, 1, 2, 5, 64, 1001}) {
    for (const std::size_t n : {1, 2, 3, 7}) {
      std::uint64_t end = 0;
      for (std::size_t part = 0; part < n; ++part) {
        const Part each = part_of(count, part, n);
        REQUIRE(each.begin == end);
        REQUIRE(each.size() >= count / n);
        REQUIRE(each.size() <= count / n + 1);
        end = each.end;
      }
      REQUIRE(end == count);
    }
  }
}

// A case each: they are the longest of all.
TEST_CASE("hosts: all kinds, dtypes and sizes, pairs") {
  test_all_kinds(maker(pairs), Order::kAny);
}
TEST_CASE("hosts: all kinds, dtypes and sizes, in turn") {
  test_all_kinds(maker(in_turn), Order::kAny);
}
TEST_CASE("hosts: all kinds, dtypes and sizes, last alone") {
  test_all_kinds(maker(last_alone), Order::kAny);
}
TEST_CASE("hosts: all dtypes and ops") {
  for (const Make& make : makers()) {
    test_all_ops(make, Order::kAny);
  }
}
TEST_CASE("hosts: a mismatch fails one call and the next works") {
  for (const Make& make : makers()) {
    test_mixed_with_mismatches(make, Order::kAny);
  }
}
TEST_CASE("hosts: factors of each rank") {
  for (const Make& make : makers()) {
    test_premul_factors(make, Order::kAny);
  }
}
TEST_CASE("hosts: a refusal names the rank") {
  for (const Make& make : makers()) {
    test_refusal_names_the_rank(make);
  }
}
TEST_CASE("hosts: abort") {
  for (const Make& make : makers()) {
    test_abort(make);
  }
}
