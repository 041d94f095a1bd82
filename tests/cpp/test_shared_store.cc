#include "shm/shared_store.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "catch.h"

using namespace horon;

namespace {

using Way = StoreChoice::Way;

constexpr std::size_t kBytes = 1000;

void record(StoreChoice& choice, Way way, double nanoseconds_per_byte, int times = 1) {
  for (int i = 0; i < times; ++i) {
    choice.record(way, kBytes, nanoseconds_per_byte * kBytes);
  }
}

std::vector<std::byte> random_bytes(std::size_t size) {
  std::minstd_rand random(static_cast<unsigned>(size) + 1);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random() >> 8);
  }
  return bytes;
}

}  // namespace

TEST_CASE("store choice: cached until streaming was seen to be twice as fast") {
  struct Case {
    double cached;
    double streaming;
    Way way;
  };
  for (const Case& c :
       {Case{1, 1, Way::kCached}, Case{1, 0.6, Way::kCached}, Case{1, 0.5, Way::kCached},
        Case{1, 0.4, Way::kStreaming}, Case{0.1, 1, Way::kCached}, Case{10, 1, Way::kStreaming}}) {
    StoreChoice choice;
    REQUIRE(choice.way() == Way::kCached);
    record(choice, Way::kCached, c.cached);
    REQUIRE(choice.way() == Way::kCached);  // nothing to compare with
    record(choice, Way::kStreaming, c.streaming);
    INFO(c.cached << " against " << c.streaming);
    REQUIRE(choice.way() == c.way);
  }
}

TEST_CASE("store choice: the unknown way is tried once the other one is known") {
  StoreChoice choice;
  for (int i = 0; i < 8; ++i) {
    REQUIRE_FALSE(choice.wants_trial());
    record(choice, Way::kCached, 1);
  }
  REQUIRE(choice.wants_trial());
  REQUIRE_FALSE(choice.wants_trial());
  record(choice, Way::kStreaming, 1);
  REQUIRE_FALSE(choice.wants_trial());
}

TEST_CASE("store choice: first copies that wait for pages are no reason to stream") {
  StoreChoice choice;
  for (int i = 0; i < 1000; ++i) {
    const Way way = choice.wants_trial() ? Way::kStreaming : Way::kCached;
    const double cached = i < 7 ? 3 : 0.2;  // the trials come to where there are pages already
    record(choice, way, way == Way::kCached ? cached : 0.3);
    REQUIRE(choice.way() == Way::kCached);
  }
}

TEST_CASE("store choice: the other way is tried again now and then") {
  StoreChoice choice;
  record(choice, Way::kCached, 1, 8);
  REQUIRE(choice.wants_trial());
  record(choice, Way::kStreaming, 1);
  int trials = 0;
  for (int i = 0; i < 1000; ++i) {
    record(choice, Way::kCached, 1);
    if (choice.wants_trial()) {
      ++trials;
      record(choice, Way::kStreaming, 1);
    }
  }
  REQUIRE(trials >= 10);
  REQUIRE(trials <= 20);
}

TEST_CASE("store choice: follows a change of the machine, both ways") {
  StoreChoice choice;
  record(choice, Way::kCached, 0.2);
  record(choice, Way::kStreaming, 0.3);
  REQUIRE(choice.way() == Way::kCached);
  record(choice, Way::kCached, 3, 10);  // the ranks were moved apart
  REQUIRE(choice.way() == Way::kStreaming);
  record(choice, Way::kCached, 0.2);  // a trial, after they came together again
  REQUIRE(choice.way() == Way::kCached);
}

TEST_CASE("store choice: one interrupted copy changes little") {
  StoreChoice choice;
  record(choice, Way::kCached, 0.2, 5);
  record(choice, Way::kStreaming, 0.3, 5);
  record(choice, Way::kStreaming, 1000);
  record(choice, Way::kCached, 0.2);
  REQUIRE(choice.way() == Way::kCached);
  StoreChoice other;
  record(other, Way::kCached, 1, 5);
  record(other, Way::kStreaming, 0.1, 5);
  REQUIRE(other.way() == Way::kStreaming);
  record(other, Way::kStreaming, 1000);  // counts as at most four times what was known
  REQUIRE(other.way() == Way::kStreaming);
}

TEST_CASE("store choice: a copy that took no time is survived") {
  StoreChoice choice;
  record(choice, Way::kCached, 0, 3);
  record(choice, Way::kStreaming, 0, 3);
  REQUIRE(choice.way() == Way::kCached);
  record(choice, Way::kCached, 1, 10);
  record(choice, Way::kStreaming, 0.1, 10);
  REQUIRE(choice.way() == Way::kStreaming);
}

TEST_CASE("copy_streaming: every alignment and size, and nothing beside") {
  constexpr std::size_t kMargin = 80;
  constexpr std::byte kGuard{0x5c};
  for (std::size_t to_offset = 0; to_offset < 64; ++to_offset) {
    for (std::size_t size = 0; size < 330; size += size < 140 ? 1 : 13) {
      const std::size_t from_offset = (to_offset * 7 + size) % 64;
      const std::vector<std::byte> source = random_bytes(from_offset + size);
      alignas(64) std::byte target[64 + 330 + 2 * kMargin];
      std::memset(target, static_cast<int>(kGuard), sizeof target);
      std::byte* to = target + kMargin - kMargin % 64 + to_offset;
      copy_streaming(to, source.data() + from_offset, size);
      if (size > 0) {
        REQUIRE(std::memcmp(to, source.data() + from_offset, size) == 0);
      }
      for (const std::byte* at = target; at < target + sizeof target; ++at) {
        if (at < to || at >= to + size) {
          REQUIRE(*at == kGuard);
        }
      }
    }
  }
}

TEST_CASE("shared store: copies right, whichever way it takes") {
  SharedStore store;
  const std::vector<std::byte> source = random_bytes(300000);
  std::vector<std::byte> target(source.size() + 1);
  std::mt19937 random(1);
  for (int i = 0; i < 600; ++i) {
    constexpr std::size_t kSizes[] = {0, 1, 64, 16383, 16384, 16385, 32768, 65535, 65536, 81920};
    const std::size_t size =
        i % 2 == 0 ? kSizes[random() % std::size(kSizes)] : random() % source.size();
    const std::size_t at = random() % (source.size() - size + 1);
    target[at + size] = std::byte{0x77};
    store.copy(target.data() + at, source.data() + at, size);
    REQUIRE((size == 0 || std::memcmp(target.data() + at, source.data() + at, size) == 0));
    REQUIRE(target[at + size] == std::byte{0x77});
  }
  store.copy(nullptr, nullptr, 0);
}

TEST_CASE("shared store: a swap is right, whatever its lengths, streaming or not") {
  StoreChoice streaming;
  record(streaming, Way::kCached, 10, 1);
  record(streaming, Way::kStreaming, 0.001, 1);
  REQUIRE(SharedStore(streaming).is_streaming());
  SharedStore store = GENERATE_COPY(SharedStore(), SharedStore(streaming));
  for (const std::size_t out : {0, 1, 100, 200000}) {
    for (const std::size_t in : {0, 1, 100, 100000, 200000}) {
      INFO(out << " bytes out, " << in << " in");
      const auto before = random_bytes(std::max(out, in));
      const auto from = random_bytes(in);
      auto shared = before;
      auto expected = before;
      std::copy(from.begin(), from.end(), expected.begin());
      std::vector<std::byte> to(out);
      store.swap(to.data(), out, shared.data(), from.data(), in);
      REQUIRE(std::equal(to.begin(), to.end(), before.begin()));
      REQUIRE(shared == expected);
    }
  }
}
