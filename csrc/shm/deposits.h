// What the ranks bring to operations: one ring of bytes per rank, written by its owner in the order
// of the operations and read by everybody.
//
// Note [Deposits]
// A deposit is a header, its counts, and, if the message is small, the message itself. Operation
// number s of one rank lies at the same place for every reader, because each of them has read all
// earlier headers, which say how long they are. So an operation can be deposited long before the
// others come to it; a small one then needs nothing more from this rank, and any number of them may
// be under way. Space is free again when every rank is done with what lies there (kFinished).
// A deposit never wraps: it starts at the beginning when the largest possible one would not fit.
//
// Who has started an operation may go away and finish it much later; the other ranks must be able
// to deposit theirs before that. Their deposits may be longer (a broadcast's root), and their rings
// may end elsewhere. So room to start leaves enough for any rank: see has_room_to_start().
#pragma once

#include <cstdint>
#include <vector>

#include "core/header.h"
#include "shm/segment.h"
#include "shm/shared_store.h"
#include "shm/step_board.h"

namespace horon {

// Thread safety: none; belongs to whoever has the lane's turn.
// Ownership: views of a segment, a board and a store that outlive it.
class Deposits {
 public:
  Deposits(Segment* segment, StepBoard* board, SharedStore* store, int rank);

  // Whether the next deposit would have room now.
  bool has_room();
  // Waits until it has. Throws as StepBoard::await_all.
  void await_room(const WaitContext& context);

  // Whether the next operation, of which no rank publishes more than `longest` bytes, can be left
  // to be finished later: this rank has room for it, and no rank would lack room because of what
  // this one has not finished. Always true of one operation, when the others are up to date.
  bool has_room_to_start(std::uint64_t longest);

  // Arrives at the next operation. Requires room. `longest`: as above, if it is being started.
  void deposit(const Request& request, std::uint64_t arena_offset, std::uint64_t longest = 0);

  // Number of the oldest operation that was not finished, and of the next one to be deposited.
  std::uint64_t current() const { return current_; }
  std::uint64_t next() const { return next_; }

  // The current operation's headers, by rank. Valid after await_all().
  const std::vector<HeaderView>& headers() const { return headers_; }
  // Whether everybody has arrived at the current operation.
  bool have_all_arrived() const { return board_->have_all_reached(Counter::kArrived, arrivals()); }
  void await_all(const WaitContext& context) {
    board_->await_all(Counter::kArrived, arrivals(), context);
    look_at_current();
  }
  // Whether await_all() would throw now, whatever its deadline.
  bool arrivals_would_fail() { return board_->would_fail(Counter::kArrived, arrivals()); }
  // Wait for at most about a millisecond.
  void await_arrivals_briefly() { board_->await_briefly(Counter::kArrived, arrivals()); }
  bool spin_for_arrivals(Clock::duration time) const {
    return board_->spin_for(time, Counter::kArrived, arrivals());
  }
  void await_room_briefly() {
    board_->await_briefly(Counter::kFinished, static_cast<std::uint32_t>(freed_) + 1);
  }

  // This rank is done with the current operation's deposits. Requires that all have arrived.
  void finish();

 private:
  // At most so many operations are under way; a power of two.
  static constexpr std::uint32_t kMostUnderWay = 256;

  std::uint32_t arrivals() const { return static_cast<std::uint32_t>(current_) + 1; }
  // Own deposits that were not finished.
  struct UnderWay {
    std::size_t begin = 0;
    std::size_t most_bytes = 0;  // that any rank deposits for this operation
  };

  std::size_t length(const Header& header) const;
  // Where the deposit after one that begins at `begin` starts.
  std::size_t start_after(std::size_t begin, const Header& header) const;
  void look_at_current();
  std::uint64_t oldest_unfinished() const;

  Segment* const segment_;
  StepBoard* const board_;
  SharedStore* const store_;
  const int rank_;
  const int n_ranks_;
  const std::size_t ring_bytes_;
  const std::size_t inline_bytes_;
  const std::size_t largest_;         // of all deposits
  std::uint64_t next_ = 0;            // operation to be deposited
  std::uint64_t current_ = 0;         // operation to be finished
  std::uint64_t freed_ = 0;           // operations that everybody has finished, when last asked
  std::size_t write_at_ = 0;          // of operation next_
  std::vector<std::size_t> read_at_;  // of operation current_, by rank
  std::vector<UnderWay> under_way_;   // by operation, modulo kMostUnderWay
  std::size_t under_way_bytes_ = 0;   // sum of most_bytes of operations current_ to next_
  std::vector<HeaderView> headers_;   // of operation current_
};

}  // namespace horon
