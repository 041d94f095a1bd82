// Collectives between ranks that share memory.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "core/header.h"
#include "core/pending_writes.h"
#include "core/transport.h"
#include "core/wait_trust.h"
#include "shm/claims.h"
#include "shm/data_ring.h"
#include "shm/deposits.h"
#include "shm/group_arenas.h"
#include "shm/shared_store.h"
#include "shm/step_board.h"

namespace horon {

class ShmTransport final : public Transport {
 public:
  // Ownership: what is pointed to outlives the transport. Without arenas everything goes through
  // the segment.
  ShmTransport(Segment* segment, const Peers* peers, const GroupArenas* arenas = nullptr);

  void run(const Request& request, const WaitContext& context) override;
  // What does not travel with the header, which is copied out of one piece.
  bool takes_pieces(std::uint64_t bytes) const override {
    return bytes > segment_->layout().inline_bytes();
  }
  Leaving run_and_leave(const Request& request, const WaitContext& context) override;
  bool has_left_ended() override;
  void await_left(const WaitContext& context) override;
  void let_go_left() override;
  bool start(const Request& request) override;
  bool is_ready() override;
  bool await_start() override;
  void complete(const Request& request, const WaitContext& context) override;
  bool meet(const Request& request, std::chrono::milliseconds patience) override;
  void let_go(const Request& request) override;
  void abort(const std::string& reason) override;
  void depart() override;

 private:
  template <typename Operation>
  void run_guarded(const Request& request, std::uint64_t number, const WaitContext& context,
                   const Operation& operation);
  // Shows the others what this rank brings to the next operation. Requires room.
  void arrive(const Request& request);
  // With `may_leave` a reduction in the arenas is over with this rank's part of it, in left_.
  void carry_out(const Request& request, const WaitContext& context, bool may_leave);
  void complete_current(const Request& request, const WaitContext& context, bool may_leave = false);
  void step(const WaitContext& context);
  const std::vector<HeaderView>& headers() const { return deposits_.headers(); }
  OperationName whole_of(const Request& request, std::uint64_t number) const;
  [[noreturn]] void end_group(const Request& request, std::uint64_t number,
                              const std::string& reason, const std::vector<int>& missing = {});
  // Where in this process's arena the data of an operation lies, for its header.
  std::uint64_t arena_offset(const Request& request) const;
  void quarantine(const Request& request);

  void exchange(const Request& request, const WaitContext& context);
  void swap_with_peers(const Request& request, const WaitContext& context);
  void copy_own_part(const Request& request) const;
  void copy_own_part(const Request& request, std::uint64_t begin, std::size_t bytes) const;
  // Large reductions; the first piece may have been copied in before the arrival.
  class OwnedSlices;
  bool may_copy_first(const Request& request, std::uint64_t arena_offset) const;
  void copy_in_first_slices(const Request& request);
  void reduce_owned(const Request& request, bool is_first_copied, const WaitContext& context);
  void reduce_large(const Request& request, const WaitContext& context);
  void reduce_scatter(const Request& request, const WaitContext& context);

  Segment* const segment_;
  const Peers* const peers_;
  const GroupArenas* const arenas_;  // null: none
  const int rank_;
  const int n_ranks_;
  StepBoard board_;
  SharedStore store_;
  Deposits deposits_;
  PendingWrites pending_writes_;
  Claims claims_;
  // Operations that this rank has done its part of; read by abort() from other threads.
  std::atomic<std::uint64_t> finished_{0};
  DataRing ring_;
  std::string ended_;               // not empty: why nothing runs any more
  bool lacks_room_ = false;         // why start() said no
  std::uint64_t wanted_bytes_ = 0;  // and for what it lacked room
  bool shows_arena_ = false;        // peers may use this rank's tensors of the running operation
  bool has_arrived_ = false;        // meet() has; run() is next
  std::optional<Request> left_;     // by run_and_leave()
  std::uint32_t left_step_ = 0;     // with which it ends
  std::uint32_t common_lead_bytes_ = 0;  // of the last one that might be left
  std::uint32_t n_meetings_ = 0;  // the same on all ranks that are asked to meet for the same
  WaitTrust meeting_trust_;
};

}  // namespace horon
