// The control channel of named operations between ranks of several hosts: a connection of each rank
// to rank 0.
//
// Note [Reader thread]
// One thread waits for all connections, and uses no CPU while nothing comes. It takes what arrives,
// writes what did not fit into a socket before, and passes on at once what ends everything: a
// poison, or a connection that broke without a goodbye. Who attends only meets the queues.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/closed_in_child.h"
#include "core/control_channel.h"
#include "core/doorbell.h"
#include "cross/greeting.h"

namespace horon {

class TcpControlChannel final : public ControlChannel {
 public:
  // `peers` is what meet_coordinator returned.
  TcpControlChannel(int rank, int n_ranks, std::vector<RemotePeer> peers);
  // Without depart() before, the others take this rank for dead.
  ~TcpControlChannel() override;

  void send(int rank, Bytes bytes, bool is_urgent) override;
  bool flush() override;
  bool receive(int* source, Bytes* bytes) override;
  std::uint32_t events() const override { return count_.load(std::memory_order_seq_cst); }
  void sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) override;
  void wake() override { bell_.ring(true); }
  bool spin(std::uint32_t seen) override;
  bool linger(std::uint32_t seen, std::chrono::nanoseconds /*limit*/) override {
    return spin(seen);
  }
  bool pause(std::uint32_t seen) override { return events() != seen; }
  void attend() override { bell_.attend(); }
  void leave_to_background(bool only_urgent) override { bell_.leave_to_background(only_urgent); }
  void give_up_meeting(std::uint32_t /*meeting*/) override {}  // nobody meets over a network
  std::uint32_t given_up_meeting() const override { return 0; }
  bool is_poisoned() override { return is_poisoned_.load(std::memory_order_acquire); }
  std::string failure() override;
  std::vector<LateRank> late_ranks(const std::vector<int>& ranks) const override;
  bool has_departed(int rank) override;
  void poison(const std::string& reason) override;
  void depart() override;

 private:
  enum class FrameType : std::uint32_t { kMessage, kUrgentMessage, kPoison, kGoodbye };
  struct FrameHead {
    FrameType type = FrameType::kMessage;
    std::uint32_t bytes = 0;  // that follow
  };
  struct Message {
    int source = 0;
    Bytes bytes;
  };
  struct Connection {
    RemotePeer peer;
    std::optional<ClosedInChild> guard;
    // Guarded by mutex_:
    std::deque<Bytes> outgoing;  // framed
    std::size_t written = 0;     // of the first
    bool is_open = true;
    bool has_departed = false;
    // The reader thread's:
    FrameHead head;
    std::size_t head_bytes = 0;  // that have come
    Bytes body;
    std::size_t body_bytes = 0;  // that have come
  };

  void read_loop();
  void read_from(Connection& connection);
  bool read_some(Connection& connection);
  void take_frame(Connection& connection);
  void lose(Connection& connection, const std::string& why);
  Connection* connection_to(int rank);
  // All below require mutex_.
  void queue_frame(Connection& connection, FrameType type, const void* data, std::size_t bytes);
  bool write_some(Connection& connection);
  bool write_all();
  void poison_here(const std::string& reason, const Connection* told_by);

  const int rank_;
  const int n_ranks_;
  UniqueFd epoll_;
  UniqueFd stop_;  // an eventfd
  std::atomic<std::uint32_t> count_{0};
  std::atomic<std::uint32_t> waiters_{0};
  Doorbell bell_{count_, waiters_};
  std::atomic<bool> is_poisoned_{false};

  std::mutex mutex_;
  // Guarded by mutex_; the vector itself never changes:
  std::vector<std::unique_ptr<Connection>> connections_;
  std::deque<Message> inbox_;
  std::string failure_;
  bool has_left_ = false;

  std::thread reader_;
};

}  // namespace horon
