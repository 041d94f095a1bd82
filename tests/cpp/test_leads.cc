#include "named/leads.h"

#include <random>

#include "catch.h"
#include "shm/rank_slice.h"

using namespace horon;  // NOLINT

namespace {

using std::chrono::microseconds;

std::vector<Slice> slices(std::uint64_t count, std::size_t element_bytes,
                          const std::vector<std::uint32_t>& leads) {
  PerRank<std::uint32_t> given;
  for (const std::uint32_t lead : leads) {
    given.push_back(lead);
  }
  std::vector<Slice> all;
  for (int rank = 0; rank < static_cast<int>(leads.size()); ++rank) {
    all.push_back(slice_by_lead(count, element_bytes, rank, given));
  }
  return all;
}

}  // namespace

TEST_CASE("leads: slices are all of a tensor, whatever the leads are") {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const std::size_t element = std::size_t{1} << random() % 5;
    const std::uint64_t count = random() % 3 == 0 ? random() % 100 : random() % (1U << 24);
    std::vector<std::uint32_t> leads(1 + random() % 8);
    for (std::uint32_t& lead : leads) {
      const std::uint64_t most = std::uint64_t{1} << random() % 33;
      lead = static_cast<std::uint32_t>(random() % most);
    }
    std::uint64_t end = 0;
    for (const Slice& slice : slices(count, element, leads)) {
      REQUIRE(slice.begin == end);
      REQUIRE(slice.begin <= slice.end);
      end = slice.end;
      REQUIRE((end == count || end * element % kCacheLineBytes == 0));
    }
    REQUIRE(end == count);
  }
}

TEST_CASE("leads: who leads by so many bytes takes so many more") {
  const auto bytes = [](const std::vector<std::uint32_t>& leads) {
    std::vector<std::uint64_t> all;
    for (const Slice& slice : slices(1000 * 64, 4, leads)) {
      all.push_back((slice.end - slice.begin) * 4);
    }
    return all;
  };
  using Bytes = std::vector<std::uint64_t>;
  REQUIRE(bytes({0, 0}) == Bytes{128000, 128000});
  REQUIRE(bytes({64000, 64000}) == Bytes{128000, 128000});  // only differences count
  REQUIRE(bytes({0, 64000}) == Bytes{96000, 160000});
  REQUIRE(bytes({256000, 0}) == Bytes{256000, 0});
  REQUIRE(bytes({0, 4000000000}) == Bytes{0, 256000});
  REQUIRE(bytes({64000, 0, 64000, 0}) == Bytes{96000, 32000, 96000, 32000});
  REQUIRE(bytes({192000, 0, 192000, 0}) == Bytes{128000, 0, 128000, 0});
}

TEST_CASE("leads: grow with waits after an operation, and shrink without") {
  int operation = 0;
  Leads leads;
  REQUIRE(leads.of(&operation) == 0);
  REQUIRE_FALSE(leads.is_looking());
  const auto step = [&](microseconds wait) {
    leads.ran(&operation, 8U << 20, 0);
    REQUIRE(leads.is_looking());
    leads.waited(wait);
    REQUIRE_FALSE(leads.is_looking());
    return leads.of(&operation);
  };
  REQUIRE(step(microseconds(30)) == 0);  // what agreeing takes
  const std::uint32_t once = step(microseconds(250));
  REQUIRE(once > 400'000);
  REQUIRE(once < 800'000);
  REQUIRE(step(microseconds(250)) > once);
  const std::uint32_t before = leads.of(&operation);
  REQUIRE(step(microseconds(1'000'000)) <= before + 3'000'000);  // whatever that was
  for (int i = 0; i < 1000; ++i) {
    REQUIRE(step(microseconds(100'000)) <= 8U << 20);
  }
  REQUIRE(leads.of(&operation) == 8U << 20);  // not more than there is
  for (int i = 0; i < 200; ++i) {
    step(microseconds(0));
  }
  REQUIRE(leads.of(&operation) < 1000);
}

TEST_CASE("leads: operations that do not come again are forgotten") {
  std::vector<int> operations(1000);
  Leads leads;
  for (const int& operation : operations) {
    leads.ran(&operation, 1U << 20, 0);
    leads.waited(microseconds(200));
  }
  REQUIRE(leads.of(&operations.front()) == 0);
  REQUIRE(leads.of(&operations.back()) > 0);
}

TEST_CASE("leads: a rank that is always slower is left less to do, until nobody waits") {
  int operation = 0;
  Leads leads[2];
  constexpr std::uint64_t kBytes = 8U << 20;
  constexpr double kBytesPerMicrosecond = 10'000;
  double lateness = 0;  // of rank 0, in microseconds
  for (int step = 0; step < 200; ++step) {
    const std::uint32_t common = std::min(leads[0].of(&operation), leads[1].of(&operation));
    const auto all = slices(kBytes, 1, {leads[0].of(&operation), leads[1].of(&operation)});
    const double more = static_cast<double>(all[0].end - all[0].begin) -
                        static_cast<double>(all[1].end - all[1].begin);
    lateness = 400 + more / kBytesPerMicrosecond;  // it computes for so much longer
    for (int rank = 0; rank < 2; ++rank) {
      leads[rank].ran(&operation, kBytes, common);
      const double wait = std::max(rank == 1 ? lateness : -lateness, 0.0);
      leads[rank].waited(std::chrono::nanoseconds(static_cast<std::int64_t>(1000 * wait)));
    }
  }
  REQUIRE(lateness < 130);  // 50 of which are taken for no wait
  REQUIRE(lateness > 0);
}

TEST_CASE("leads: ranks that all wait much differ all the same by how much") {
  int operation = 0;
  Leads leads[2];
  constexpr std::uint64_t kBytes = 8U << 20;
  for (int step = 0; step < 200; ++step) {
    const std::uint32_t common = std::min(leads[0].of(&operation), leads[1].of(&operation));
    for (int rank = 0; rank < 2; ++rank) {  // 500 and 400 microseconds of each two steps
      const bool waits = step % 2 == rank;
      leads[rank].ran(&operation, kBytes, common);
      leads[rank].waited(microseconds(waits ? rank == 0 ? 500 : 400 : 0));
    }
  }
  // Twenty of these steps' differences are known, of 100 microseconds less what is taken for no
  // wait; and one step's wait, for who has waited last.
  const auto lead =
      static_cast<double>(leads[0].of(&operation)) - static_cast<double>(leads[1].of(&operation));
  REQUIRE(lead > 0.5e6);
  REQUIRE(lead < static_cast<double>(kBytes));
}
