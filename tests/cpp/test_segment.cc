#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <thread>

#include "catch.h"
#include "core/header.h"
#include "rank_threads.h"
#include "shm/shm_control_channel.h"

using namespace horon;
using namespace horon::testing;

namespace {

struct Region {
  std::string what;
  std::size_t begin;
  std::size_t bytes;
  std::size_t alignment;
};

std::vector<Region> regions_of(const SegmentLayout& layout) {
  const int n = layout.n_ranks();
  std::vector<Region> regions = {{"head", 0, sizeof(SegmentHead), kCacheLineBytes}};
  for (int a = 0; a < n; ++a) {
    regions.push_back(
        {concat("words ", a), layout.words_offset(a), sizeof(RankWords), kCacheLineBytes});
    regions.push_back(
        {concat("deposits ", a), layout.deposits_offset(a), layout.deposit_bytes(), 4096});
    regions.push_back({concat("data ", a), layout.data_offset(a), layout.buffer_bytes(), 4096});
    for (int b = 0; b < n; ++b) {
      regions.push_back({concat("ring ", a, ' ', b), layout.ring_offset(a, b),
                         sizeof(RingWords) + layout.ring_bytes(), 4096});
    }
  }
  return regions;
}

Segment make_segment(int n, const Options& options) {
  const SegmentLayout layout(n, options);
  const UniqueFd file = create_shared_file(layout.total_bytes(), layout.reserved_bytes());
  return Segment(Mapping(file.get(), layout.total_bytes()), layout);
}

}  // namespace

TEST_CASE("the regions of a segment are aligned and do not overlap") {
  Options odd;
  odd.inline_bytes = 64;
  odd.buffer_bytes = 4096 + 64;
  odd.ring_bytes = 4096 + 128;
  odd.eager_bytes = 64;
  Options none = small_options();
  none.inline_bytes = 0;
  for (const Options& options : {Options(), small_options(), odd, none}) {
    for (const int n : {1, 2, 3, 5, 8, 17, 64}) {
      INFO(options.fingerprint() << " on " << n << " ranks");
      const SegmentLayout layout(n, options);
      std::vector<Region> regions = regions_of(layout);
      std::sort(regions.begin(), regions.end(),
                [](const Region& a, const Region& b) { return a.begin < b.begin; });
      for (std::size_t i = 0; i < regions.size(); ++i) {
        const Region& region = regions[i];
        const std::size_t next =
            i + 1 < regions.size() ? regions[i + 1].begin : layout.total_bytes();
        INFO(region.what << " at " << region.begin);
        REQUIRE(region.begin % region.alignment == 0);
        REQUIRE(region.begin + region.bytes <= next);
        // All but the rings is reserved.
        REQUIRE((region.what.rfind("ring", 0) == 0) == (region.begin >= layout.reserved_bytes()));
      }
    }
  }
}

TEST_CASE("two groups of 8 ranks and a control channel fit into a container's /dev/shm") {
  const std::size_t group = SegmentLayout(8, {}).total_bytes();
  const std::size_t control = SegmentLayout(8, ShmControlChannel::options({})).total_bytes();
  REQUIRE(2 * group + control < std::size_t{64} << 20);
}

TEST_CASE("a new segment is zero, and the file can not be resized") {
  const SegmentLayout layout(2, small_options());
  const UniqueFd file = create_shared_file(layout.total_bytes(), layout.reserved_bytes());
  REQUIRE_NOTHROW(check_shared_file(file.get(), layout.total_bytes()));
  REQUIRE_THROWS_AS(check_shared_file(file.get(), layout.total_bytes() + 4096), Error);
  REQUIRE(::ftruncate(file.get(), 0) != 0);
  const Segment segment(Mapping(file.get(), layout.total_bytes()), layout);
  REQUIRE_FALSE(segment.is_poisoned());
  for (int rank = 0; rank < 2; ++rank) {
    REQUIRE(segment.words(rank).counter(Counter::kStep).value == 0);
    REQUIRE(segment.words(rank).departed == 0);
    REQUIRE(segment.ring_words(rank, 1 - rank).written == 0);
  }
  const Segment other(Mapping(file.get(), layout.total_bytes()), layout);
  segment.words(1).counter(Counter::kStep).value = 7;
  REQUIRE(other.words(1).counter(Counter::kStep).value == 7);  // one memory, two mappings
}

TEST_CASE("a file that could still shrink is refused, one that can not be sealed at all is not") {
  const UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), 4096) == 0);
  REQUIRE_THROWS_AS(check_shared_file(unsealed.get(), 4096), Error);
  // What takes the place of a memfd where those are forbidden.
  const std::string name = concat("/horon-test-", ::getpid());
  const UniqueFd file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  ::shm_unlink(name.c_str());
  REQUIRE(::ftruncate(file.get(), 4096) == 0);
  REQUIRE_NOTHROW(check_shared_file(file.get(), 4096));
}

TEST_CASE("the first poison wins, among many threads too") {
  Segment segment = make_segment(3, small_options());
  segment.poison(2, "first");
  segment.poison(1, "second");
  REQUIRE(segment.is_poisoned());
  REQUIRE(segment.poison_text() == "first");

  for (int round = 0; round < 50; ++round) {
    Segment contested = make_segment(4, small_options());
    const Errors errors = run_ranks(4, [&](int rank) {
      contested.poison(rank, std::string(100, static_cast<char>('a' + rank)));
      while (!contested.is_poisoned()) {
        std::this_thread::yield();  // the winner is still writing
      }
      const std::string text = contested.poison_text();
      expect(text.size() == 100 && text == std::string(100, text[0]), "torn text: ", text);
    });
    require_no_errors(errors);
  }
}

TEST_CASE("a rank that dies while it poisons does not keep the others from it") {
  Segment segment = make_segment(2, small_options());
  segment.head().poison.store(1);  // writing the text, for ever
  REQUIRE_FALSE(segment.is_poisoned());
  segment.poison(7, "somebody else");
  REQUIRE(segment.is_poisoned());
  REQUIRE(segment.is_poisoned(0));
  REQUIRE(segment.poison_text() == "a rank failed, and died before it could say why");
}

TEST_CASE("a poison text that is too long is cut") {
  Segment segment = make_segment(1, small_options());
  segment.poison(0, std::string(5000, 'x'));
  REQUIRE(segment.poison_text() == std::string(kPoisonTextBytes - 1, 'x'));
}

TEST_CASE("a departure marks one rank and rings everybody") {
  Segment segment = make_segment(3, small_options());
  const std::uint32_t before = segment.words(0).doorbell;
  segment.depart(1);
  REQUIRE(segment.words(0).departed == 0);
  REQUIRE(segment.words(1).departed == 1);
  REQUIRE(segment.words(2).departed == 0);
  REQUIRE(segment.words(0).doorbell != before);
  REQUIRE_FALSE(segment.is_poisoned());
}

TEST_CASE("mappings move") {
  const UniqueFd file = create_shared_file(8192, 4096);
  Mapping first(file.get(), 8192);
  first.data()[5000] = std::byte{3};
  Mapping second = std::move(first);
  REQUIRE(second.data()[5000] == std::byte{3});
  REQUIRE(second.bytes() == 8192);
  Mapping third;
  third = std::move(second);
  REQUIRE(third.data()[5000] == std::byte{3});
  REQUIRE_THROWS_AS(Mapping(-1, 4096), Error);
}
