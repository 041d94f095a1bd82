// The control channel of named operations between ranks that share memory.
//
// Rings and doorbells are those of a Segment of its own; see Note [Who is woken] in doorbell.h.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "core/control_channel.h"
#include "core/doorbell.h"
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
  bool linger(std::uint32_t seen, std::chrono::nanoseconds limit) override;
  bool pause(std::uint32_t seen) override;
  void attend() override;
  void leave_to_background(bool only_urgent) override;
  void give_up_meeting(std::uint32_t meeting) override;
  std::uint32_t given_up_meeting() const override;
  bool is_poisoned() override;
  std::string failure() override;
  bool has_departed(int rank) override;
  std::vector<LateRank> late_ranks(const std::vector<int>& ranks) const override;
  void poison(const std::string& reason) override;
  void depart() override;

 private:
  struct Outgoing {
    std::deque<Bytes> messages;
    std::size_t written = 0;  // of the first
    bool is_urgent = false;   // any of them
  };

  Doorbell doorbell_of(int rank) const;
  bool write_to(int rank);
  bool read_from(int rank);

  const std::unique_ptr<SharedGroup> group_;  // may be null
  Segment* const segment_;
  const Peers* const peers_;
  RankWords* const own_;
  Doorbell own_bell_;
  // The attendant's:
  WaitPolicy policy_;
  std::vector<Outgoing> outgoing_;  // by rank
  std::vector<int> unsent_;         // ranks with something outgoing
  std::vector<Bytes> incoming_;     // by rank: a message that has come in part
  int next_source_ = 0;
};

}  // namespace horon
