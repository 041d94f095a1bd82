// What a rank publishes in the arrival phase of every collective, and the rules that n of them
// obey.
//
// Note [Arrival phase]
// Every collective starts with each rank publishing a Header and reading all n. Until then no
// tensor is written. Agreement and the choice of algorithm are pure functions of the n headers, so
// all ranks decide alike: a mismatch fails exactly one call on every rank and the next call works.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/request.h"

namespace horon {

inline constexpr std::size_t kRefusalBytes = 240;

// Values of Header::arena_offset that are no offset.
inline constexpr std::uint64_t kNotInArena = ~std::uint64_t{0};
// Besides, this rank can not read the other ranks' arenas.
inline constexpr std::uint64_t kSeesNoArenas = kNotInArena - 1;

// Fixed part. Plain data: it is copied through shared memory and through sockets.
struct Header {
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  // Length of the byte stream that this rank publishes for the others to read.
  std::uint64_t published_bytes = 0;
  std::uint64_t batch_digest = 0;
  // Where in this rank's arena its data lies; see arena_collectives.h.
  std::uint64_t arena_offset = kSeesNoArenas;
  double factor = 1.0;
  std::int32_t root = 0;
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::uint8_t type_code = 0;
  std::uint8_t element_bytes = 1;
  std::uint8_t has_counts = 0;
  // The published stream lies right behind the counts.
  std::uint8_t is_inline = 0;
  std::uint8_t is_refused = 0;
  std::uint32_t lead_bytes = 0;  // see Request; used where all tensors are in arenas
};
static_assert(sizeof(Header) == 64);  // no padding: equal headers are equal bytes
static_assert(std::is_trivially_copyable_v<Header>);

// A header with the vectors that follow it. Views; valid as long as what they were read from.
struct HeaderView {
  const Header* header = nullptr;
  const std::uint64_t* send_counts = nullptr;  // n entries when has_counts
  const std::uint64_t* recv_counts = nullptr;  // n entries when has_counts
  const char* refusal = nullptr;               // text when is_refused
  const std::byte* inline_data = nullptr;      // published_bytes bytes when is_inline
};

// Fills the fixed part. `sequence` is the number of this operation in its group, from 0.
Header make_header(const Request& request, std::uint64_t sequence, int rank, int n_ranks);

// "all_reduce(float32, 1024 elements, SUM)".
std::string describe(const HeaderView& view, int n_ranks);
std::string describe(const Request& request, int n_ranks);
// "all_reduce #7 on rank 0 (all_reduce(float32, 1024 elements, SUM))".
std::string describe(const OperationName& operation);

// The error text when the n headers can not be one collective; nothing when they can.
// Says which rank sent what. Pure.
std::optional<std::string> find_mismatch(const std::vector<HeaderView>& headers);

// Room for a header with counts or a refusal.
std::size_t header_bytes(int n_ranks);
// Bytes of this header with what it has of counts and refusal; the inline data follows.
std::size_t header_bytes(const Header& header, int n_ranks);

// Writes header, counts and refusal at `at` (header_bytes(n_ranks) long).
void write_header(std::byte* at, const Header& header, const Request& request, int n_ranks);

// The inverse: views into what lies at `at`.
HeaderView read_header(const std::byte* at, int n_ranks);

}  // namespace horon
