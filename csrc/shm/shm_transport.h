// Collectives between ranks that share memory.
//
// Note [Rounds]
// Large messages pass through each rank's two data buffers, piece by piece, alternately. A buffer
// is written before a step and read by others after it; it is written again two rounds later, and
// by then everybody has finished the step of the round between, which comes after their reading. So
// a round needs no exit barrier, and operations follow each other without one.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/header.h"
#include "core/transport.h"
#include "shm/step_board.h"

namespace horon {

class ShmTransport final : public Transport {
 public:
  // Ownership: `segment` and `peers` outlive the transport.
  ShmTransport(Segment* segment, const Peers* peers);

  void run(const Request& request, const WaitContext& context) override;
  void abort(const std::string& reason) override;
  void depart() override;

 private:
  void run_steps(const Request& request, const WaitContext& context);
  void arrive(const Request& request, const WaitContext& context);
  void step(const WaitContext& context);
  bool all_inline() const;
  [[noreturn]] void end_group(const Request& request, const std::string& reason);

  void exchange(const Request& request, const WaitContext& context);
  void exchange_inline(const Request& request);
  void reduce_pieces(const Request& request, const WaitContext& context);
  void reduce_inline(const Request& request);
  void reduce_scatter(const Request& request, const WaitContext& context);
  void reduce_scatter_inline(const Request& request);
  std::vector<double> factors() const;

  Segment* const segment_;
  const Peers* const peers_;
  const int rank_;
  const int n_ranks_;
  StepBoard board_;
  std::uint64_t sequence_ = 0;
  // Operations that this rank has done its part of; read by abort() from other threads.
  std::atomic<std::uint64_t> finished_{0};
  int parity_ = 0;                   // of the next round
  std::vector<HeaderView> headers_;  // of the running operation
  std::string ended_;                // not empty: why nothing runs any more
};

}  // namespace horon
