#include "shm/arena.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "catch.h"
#include "in_child.h"
#include "rank_threads.h"
#include "shm/peer_arenas.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
// The thread sanitizer leaves little address space.
constexpr std::size_t kAmple = std::size_t{1} << (kHasThreadSanitizer ? 36 : 40);

// Memory that the file really takes.
std::uint64_t file_bytes(const Arena& arena) {
  struct stat status{};
  REQUIRE(::fstat(arena.file(), &status) == 0);
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

}  // namespace

TEST_CASE("arena: a budget is only address space") {
  Arena arena(kAmple);
  REQUIRE(arena.bytes() == kAmple);
  REQUIRE(file_bytes(arena) == 0);
  std::byte* data = arena.allocate(10);
  std::memset(data, 1, 10);
  REQUIRE(arena.statistics().reserved_bytes == Arena::kChunkBytes);
  REQUIRE(file_bytes(arena) == Arena::kChunkBytes);
  arena.free(data);
  REQUIRE(arena.statistics().used_bytes == 0);
}

TEST_CASE("arena: lookup") {
  Arena arena(4 * kMiB);
  std::byte* data = arena.allocate(100);
  REQUIRE(arena.contains(data, 100));
  REQUIRE(arena.contains(arena.data(), arena.bytes()));
  REQUIRE_FALSE(arena.contains(arena.data(), arena.bytes() + 1));
  REQUIRE_FALSE(arena.contains(arena.data() + 1, arena.bytes()));
  REQUIRE_FALSE(arena.contains(arena.data() - 1, 1));
  REQUIRE_FALSE(arena.contains(arena.data() + arena.bytes(), 0));
  REQUIRE_FALSE(arena.contains(nullptr, 0));
  REQUIRE_FALSE(arena.contains(data, ~std::size_t{0}));
  REQUIRE(arena.offset_of(data + 7) == static_cast<std::uint64_t>(data + 7 - arena.data()));
}

TEST_CASE("arena: a spent budget is an error that says so, and nothing is lost") {
  Arena arena(4 * kMiB);
  std::byte* all = arena.allocate(4 * kMiB);
  const std::exception_ptr error = error_of([&] { arena.allocate(1); });
  REQUIRE(threw<Error>(error));
  INFO(text_of(error));
  REQUIRE(contains(text_of(error), "HORON_ARENA_BYTES"));
  REQUIRE(contains(text_of(error), "4194304 of 4194304 are in use"));
  arena.free(all);
  arena.free(arena.allocate(4 * kMiB));
}

TEST_CASE("arena: more than the system has is an error, not a signal") {
  if (kHasThreadSanitizer) {
    return;
  }
  Arena arena(std::size_t{1} << 46);
  const std::exception_ptr error = error_of([&] { arena.allocate(std::size_t{1} << 45); });
  REQUIRE(threw<Error>(error));
  INFO(text_of(error));
  REQUIRE(contains(text_of(error), "are left of"));
  REQUIRE(arena.statistics().used_bytes == 0);
  REQUIRE(arena.statistics().reserved_bytes == 0);
  arena.free(arena.allocate(1));
}

TEST_CASE("arena: freed memory is used again, and a lot of it goes back to the system") {
  Arena arena(std::size_t{2} << 30);
  std::byte* first = arena.allocate(8 * kMiB);
  arena.free(first);
  for (int i = 0; i < 100; ++i) {
    std::byte* again = arena.allocate(8 * kMiB);
    REQUIRE(again == first);
    arena.free(again);
  }
  REQUIRE(arena.statistics().reserved_bytes == 8 * kMiB);

  // Three times what may be kept, in pieces.
  const std::size_t piece = Arena::kKeptFreeBytes / 4;
  std::vector<std::byte*> pieces;
  for (int i = 0; i < 12; ++i) {
    pieces.push_back(arena.allocate(piece));
    pieces.back()[piece - 1] = std::byte{7};
  }
  REQUIRE(arena.statistics().reserved_bytes >= 3 * Arena::kKeptFreeBytes);
  for (std::byte* data : pieces) {
    arena.free(data);
    const ArenaStatistics now = arena.statistics();
    REQUIRE(now.reserved_bytes - now.used_bytes <= std::max(Arena::kKeptFreeBytes, now.used_bytes));
    REQUIRE(file_bytes(arena) == now.reserved_bytes);
  }
  // And it can be had again.
  for (std::byte*& data : pieces) {
    data = arena.allocate(piece);
    std::memset(data, 1, piece);
  }
  for (std::byte* data : pieces) {
    arena.free(data);
  }
}

TEST_CASE("arena: foreign and doubled pointers are ignored") {
  Arena arena(4 * kMiB);
  std::byte here{};
  arena.free(&here);
  arena.free(nullptr);
  std::byte* data = arena.allocate(64);
  arena.free(data + 1);
  REQUIRE(arena.statistics().used_bytes == 64);
  arena.free(data);
  arena.free(data);
  REQUIRE(arena.statistics().used_bytes == 0);
}

TEST_CASE("arena: a quarantined block is not given out again") {
  Arena arena(4 * kMiB);
  std::byte* data = arena.allocate(kMiB);
  arena.quarantine(data + 1000);
  std::byte here{};
  arena.quarantine(&here);
  REQUIRE(arena.statistics().quarantined_bytes == kMiB);
  arena.free(data);
  REQUIRE(arena.statistics().used_bytes == kMiB);
  for (int i = 0; i < 3; ++i) {
    std::byte* other = arena.allocate(kMiB);
    REQUIRE((other >= data + kMiB || other + kMiB <= data));
  }
  REQUIRE(threw<Error>(error_of([&] { arena.allocate(kMiB); })));
}

TEST_CASE("arena: a pinned block is not given out again before it is unpinned") {
  Arena arena(kMiB);
  std::byte* const block = arena.allocate(100000);
  REQUIRE(arena.pin(block + 70000) == block);
  arena.free(block);
  REQUIRE(arena.statistics().used_bytes >= 100000);
  REQUIRE(arena.allocate(100000) != block);
  arena.unpin(block);
  REQUIRE(arena.allocate(100000) == block);
  std::byte elsewhere{};
  REQUIRE(arena.pin(&elsewhere) == nullptr);
  arena.unpin(nullptr);
}

TEST_CASE("arena: threads allocate and free at the same time") {
  Arena arena(256 * kMiB);
  require_no_errors(run_ranks(4, [&](int rank) {
    std::vector<std::pair<std::byte*, std::size_t>> mine;
    for (std::size_t i = 0; i < 300; ++i) {
      const std::size_t bytes = 1 + (i * 7919 + static_cast<std::size_t>(rank)) % 100000;
      std::byte* data = arena.allocate(bytes);
      std::memset(data, rank + 1, bytes);
      mine.emplace_back(data, bytes);
      if (i % 3 != 0) {
        const auto [old, old_bytes] = mine[mine.size() / 2];
        for (const std::size_t at : {std::size_t{0}, old_bytes - 1}) {
          expect(old[at] == static_cast<std::byte>(rank + 1), "somebody else wrote here");
        }
        arena.free(old);
        mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(mine.size() / 2));
      }
    }
    for (const auto& [data, bytes] : mine) {
      arena.free(data);
    }
  }));
  REQUIRE(arena.statistics().used_bytes == 0);
}

TEST_CASE("arena: a child reads, and what it writes stays with it") {
  Arena arena(8 * kMiB);
  std::byte* data = arena.allocate(kMiB);
  std::memset(data, 5, kMiB);
  REQUIRE(in_child([&] {
            if (!arena.become_private()) {
              return 1;
            }
            if (data[0] != std::byte{5} || data[kMiB - 1] != std::byte{5}) {
              return 2;
            }
            std::memset(data, 6, kMiB);
            arena.free(data);
            arena.quarantine(data);
            try {
              arena.allocate(1);
              return 3;
            } catch (const Error&) {
            }
            return data[7] == std::byte{6} ? 0 : 4;
          }) == 0);
  REQUIRE(data[0] == std::byte{5});
  REQUIRE(data[kMiB - 1] == std::byte{5});
  REQUIRE(arena.statistics().used_bytes == kMiB);
}

TEST_CASE("peers' arenas: mapped once, as long as somebody wants them, and not in a child") {
  Arena arena(8 * kMiB);
  std::byte* data = arena.allocate(100);
  PeerArenas peers;
  auto first = peers.map(arena.id(), arena.file(), arena.bytes());
  auto second = peers.map(arena.id(), arena.file(), arena.bytes());
  REQUIRE(first == second);
  data[99] = std::byte{3};
  std::byte* seen = first->data() + arena.offset_of(data);
  REQUIRE(seen != data);
  REQUIRE(seen[99] == std::byte{3});
  seen[98] = std::byte{4};
  REQUIRE(data[98] == std::byte{4});
  REQUIRE(in_child([&] {
            first.reset();
            second.reset();  // must not unmap what may be there instead
            return 0;
          }) == 0);
  const std::weak_ptr<PeerArena> watched = first;
  first.reset();
  second.reset();
  REQUIRE(watched.expired());
  REQUIRE(peers.map(arena.id(), arena.file(), arena.bytes())->bytes() == arena.bytes());
}

TEST_CASE("peers' arenas: another size, or a file that can shrink, is refused") {
  Arena arena(8 * kMiB);
  PeerArenas peers;
  REQUIRE(threw<Error>(error_of([&] { peers.map(arena.id(), arena.file(), 4 * kMiB); })));
  char name[] = "/tmp/horon-test-XXXXXX";
  const UniqueFd plain(::mkstemp(name));
  ::unlink(name);
  REQUIRE(peers.map(arena.id(), arena.file(), arena.bytes()));
}
