// The control channel of named operations between ranks that share memory.
//
// Note [Who is woken]
// Rings and doorbell are those of a Segment of its own. A rank's doorbell_waiters word says which
// of its threads sleep and want to be woken, as bits of a futex: the background thread, the
// attendant in the foreground, or none. So a foreground thread that attends takes the messages
// without the background thread ever waking up. One more bit says that the rank waits for nothing
// of its own: then only what is urgent wakes it.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "core/control_channel.h"
#include "shm/rendezvous.h"
#include "shm/ring.h"
#include "shm/wait_policy.h"

namespace horon {

class ShmControlChannel final : public ControlChannel {
 public:
  // Sizes of a segment for control messages: nothing else goes through it.
  static Options options(const Options& like);

  explicit ShmControlChannel(std::unique_ptr<SharedGroup> group);
  // For tests: what is pointed to outlives the channel.
  ShmControlChannel(Segment* segment, const Peers* peers);

  void send(int rank, Bytes bytes, bool is_urgent) override;
  bool flush() override;
  bool receive(int* source, Bytes* bytes) override;
  std::uint32_t events() const override;
  void sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) override;
  void wake() override;
  bool spin(std::uint32_t seen) override;
  void attend() override;
  void leave_to_background(bool only_urgent) override;
  bool is_poisoned() override;
  std::string failure() override;
  bool has_departed(int rank) override;
  void poison(const std::string& reason) override;
  void depart() override;

 private:
  struct Outgoing {
    std::deque<Bytes> messages;
    std::size_t written = 0;  // of the first
    bool is_urgent = false;   // any of them
  };

  void ring_doorbell(int rank, bool is_urgent);
  bool write_to(int rank);
  bool read_from(int rank);

  const std::unique_ptr<SharedGroup> group_;  // may be null
  Segment* const segment_;
  const Peers* const peers_;
  RankWords* const own_;
  // The attendant's:
  WaitPolicy policy_;
  std::vector<Outgoing> outgoing_;  // by rank
  std::vector<int> unsent_;         // ranks with something outgoing
  std::vector<Bytes> incoming_;     // by rank: a message that has come in part
  int next_source_ = 0;
};

}  // namespace horon
