// Who does which part of a round of work that any rank can do.
//
// Note [Claiming]
// With more ranks than cores, a rank whose share it is to reduce a slice may not be running. Where
// everybody can reach everybody's input, in the arena, whoever is awake takes the next slice. A
// claim word holds the number of the round and of the next slice, and is moved on by
// compare-and-swap; a word that still says an earlier round means slice 0. So nobody has to reset
// it, and who comes late can claim nothing. Rounds alternate between two words: one is taken up
// again only when everybody is done with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "shm/segment.h"
#include "shm/step_board.h"

namespace horon {

// Thread safety: none; belongs to whoever has the lane's turn.
// Ownership: views of a segment and a board that outlive it.
class Claims {
 public:
  static constexpr std::uint32_t kMostSlices = 128;

  Claims(Segment* segment, StepBoard* board) : segment_(segment), board_(board) {}

  // Begins the next round; every rank does, in the same order and with the same number of slices.
  void begin_round(std::uint32_t n_slices);
  // Does this rank's share of a round over `count` elements: calls work(begin, end) for each slice
  // that it gets, and returns when all slices are done, whoever did them. Throws as await_all.
  template <typename Work>
  void share(std::uint64_t count, std::size_t element_bytes, const WaitContext& context,
             const Work& work) {
    const std::uint64_t slice = slice_elements(count, element_bytes);
    begin_round(static_cast<std::uint32_t>((count + slice - 1) / slice));
    while (const auto index = claim()) {
      work(*index * slice, std::min(count, (*index + 1) * slice));
      finish();
    }
    await_all(context);
  }

  // A slice that is now this rank's to do; nothing when all are taken.
  std::optional<std::uint32_t> claim();
  // A claimed slice is done: publishes what was written.
  void finish();
  // Waits until all slices are done. Throws as StepBoard::await_all.
  void await_all(const WaitContext& context);

 private:
  // Elements of a slice, in whole cache lines, such that there are not too many. Pure.
  static std::uint64_t slice_elements(std::uint64_t count, std::size_t element_bytes);
  std::uint32_t word_of(std::uint32_t progress) const { return round_ << 8 | progress; }
  // Moves a word on by one within this round; returns how far it was.
  std::uint32_t move_on(std::atomic<std::uint32_t>& word, std::uint32_t limit);
  ClaimWords& words() const { return segment_->head().claims[round_ % 2]; }

  Segment* const segment_;
  StepBoard* const board_;
  std::uint32_t round_ = 0;  // 24 bits of it are in the words
  std::uint32_t n_slices_ = 0;
};

}  // namespace horon
