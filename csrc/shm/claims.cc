#include "shm/claims.h"

#include "core/error.h"
#include "core/round_up.h"

namespace horon {
namespace {

// Small enough that two ranks find something to do, large enough that claiming costs nothing.
constexpr std::size_t kSliceBytes = std::size_t{32} * 1024;

}  // namespace

std::uint64_t Claims::slice_elements(std::uint64_t count, std::size_t element_bytes) {
  const std::uint64_t line = kCacheLineBytes / element_bytes;
  const std::uint64_t least = (count + kMostSlices - 1) / kMostSlices;
  const std::uint64_t wanted = std::max<std::uint64_t>(kSliceBytes / element_bytes, least);
  return round_up(wanted, line);
}

void Claims::begin_round(std::uint32_t n_slices) {
  HORON_CHECK(n_slices <= kMostSlices, "claims: expected at most ", kMostSlices, " slices, got ",
              n_slices);
  // 1 to 2^24 - 1, then 2 again: never what a new segment's words hold, and odd follows even.
  round_ = round_ == (1U << 24) - 1 ? 2 : round_ + 1;
  n_slices_ = n_slices;
}

std::uint32_t Claims::move_on(std::atomic<std::uint32_t>& word, std::uint32_t limit) {
  std::uint32_t seen = word.load(std::memory_order_relaxed);
  while (true) {
    const std::uint32_t progress = seen >> 8 == round_ ? seen & 0xff : 0;
    if (progress >= limit) {
      return progress;
    }
    // Release: what was written for a slice is visible to who sees the word. Acquire: and keeps
    // that chain when several ranks move the word in turn.
    if (word.compare_exchange_weak(seen, word_of(progress + 1), std::memory_order_acq_rel,
                                   std::memory_order_relaxed)) {
      return progress;
    }
  }
}

std::optional<std::uint32_t> Claims::claim() {
  const std::uint32_t slice = move_on(words().claimed, n_slices_);
  return slice < n_slices_ ? std::optional(slice) : std::nullopt;
}

void Claims::finish() {
  if (move_on(words().done.value, n_slices_) + 1 == n_slices_) {
    board_->wake(words().done);
  }
}

void Claims::await_all(const WaitContext& context) {
  if (n_slices_ > 0) {
    board_->await_value(words().done, word_of(n_slices_), context);
  }
}

}  // namespace horon
