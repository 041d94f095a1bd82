// Collectives between ranks that do not all share memory, over a carrier of bytes.
//
// Only bytes travel: the arithmetic is ours, in rank order, so results have the same bits on all
// ranks and every dtype and reduce op works, whatever the carrier can add up. Reductions are
// reduce-scatter plus all-gather, so a rank moves 2(n-1)/n of the tensor, like a ring, or a host as
// much, where its ranks share memory (host_collectives.h). Pieces bound the memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/header.h"
#include "core/scratch.h"
#include "core/transport.h"
#include "cross/byte_transport.h"
#include "cross/host_collectives.h"

namespace horon {

class CrossTransport final : public Transport {
 public:
  // `bytes` between all ranks; `hosts` if any of them share memory.
  CrossTransport(std::shared_ptr<ByteTransport> bytes, int rank, int n_ranks,
                 std::unique_ptr<HostCollectives> hosts = nullptr);

  void run(const Request& request, const WaitContext& context) override;
  void abort(const std::string& reason) override;
  void depart() override;
  // Called with the reason when an operation has ended the group. Call before the first operation.
  void set_on_end(std::function<void(const std::string& reason)> on_end) {
    on_end_ = std::move(on_end);
  }

 private:
  void run_steps(const Request& request, const WaitContext& context);
  void arrive(const Request& request, const WaitContext& context);
  HostCollectives::Call call(const Request& request, const WaitContext& context) const;
  void exchange(const Request& request, const WaitContext& context);
  bool crosses(std::size_t source, std::size_t destination) const;
  void end(const std::string& reason);
  [[noreturn]] void fail(const OperationName& operation, const std::string& reason);
  void reduce_pieces(const Request& request, const WaitContext& context);
  void reduce_scatter(const Request& request, const WaitContext& context);

  const std::shared_ptr<ByteTransport> bytes_;  // shared: abort() comes from other threads
  const int rank_;
  const int n_ranks_;
  const std::unique_ptr<HostCollectives> hosts_;  // null: all that others get crosses a network
  std::uint64_t sequence_ = 0;                    // of the next operation
  Scratch scratch_;
  Scratch own_slot_;                 // this rank's header, and small data
  Scratch slots_;                    // the same of all ranks, of the running operation
  std::vector<HeaderView> headers_;  // views into slots_
  std::function<void(const std::string&)> on_end_;
  std::string ended_;  // not empty: why nothing runs any more
};

}  // namespace horon
