#include "shm/in_pieces.h"

#include <vector>

#include "catch.h"

using namespace horon;  // NOLINT

TEST_CASE("in pieces: all at once where nothing interrupts") {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> calls;
  const auto act = [&](std::uint64_t at, std::uint64_t bytes) {
    calls.emplace_back(at, bytes);
    return 0;
  };
  std::uint64_t done = 1;
  REQUIRE(in_pieces(4096, 1 << 30, act, &done) == 0);
  REQUIRE(done == 1 << 30);
  REQUIRE(calls == std::vector<std::pair<std::uint64_t, std::uint64_t>>{{4096, 1 << 30}});
  REQUIRE(in_pieces(0, 0, act, &done) == 0);
  REQUIRE(done == 0);
  REQUIRE(calls.size() == 1);
}

TEST_CASE("in pieces: a signal every few pages' time does not stop it") {
  constexpr std::uint64_t kBytes = (1 << 20) + 8192;
  std::uint64_t at_most = GENERATE(4096, 5000, 65536);
  std::uint64_t next = 0;
  int interrupted = 0;
  const auto act = [&](std::uint64_t at, std::uint64_t bytes) {
    if (bytes > at_most) {
      ++interrupted;
      return EINTR;
    }
    REQUIRE(at == next);
    next += bytes;
    return 0;
  };
  std::uint64_t done = 0;
  REQUIRE(in_pieces(0, kBytes, act, &done) == 0);
  REQUIRE(done == kBytes);
  REQUIRE(next == kBytes);
  REQUIRE(interrupted > 0);
  REQUIRE(interrupted < 30);
}

TEST_CASE("in pieces: another error ends it, and says how far it came") {
  int calls = 0;
  const auto act = [&](std::uint64_t, std::uint64_t bytes) {
    ++calls;
    return bytes > 10 * 4096 ? EINTR : calls < 8 ? 0 : ENOSPC;
  };
  std::uint64_t done = 0;
  REQUIRE(in_pieces(0, 100 * 4096, act, &done) == ENOSPC);
  REQUIRE(done > 0);
  REQUIRE(done < 100 * 4096);
}
