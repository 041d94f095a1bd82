// Messages between the ranks of a communicator, over abstract Unix sockets: each pair of ranks has
// one. Nothing is left in the file system, and no rank depends on another one's being alive.
//
// Note [No back pressure]
// A thread for each peer reads everything that comes and keeps it, so that a rank which sends never
// waits for the peer to want the message. What waits is the operation on top: see
// nccl_operation.cc.
//
// Thread safety: connect() is called once, before all else but abort(), which ends it too. Messages
// of one kind are sent to and received from a peer by one thread at a time. abort() may be called
// at any time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace horon::simulator {

using Bytes = std::vector<std::byte>;

enum class MessageKind : std::uint32_t {
  kCollective,
  kPointToPoint,
  kReceipt,  // of a kPointToPoint message that was received
  kControl,  // while communicators are made
  kGoodbye,  // the rank closes its communicator
};
inline constexpr std::size_t kMessageKinds = 5;

// What the call was, so that ranks can see that theirs match.
struct Signature {
  std::int32_t function = 0;
  std::int32_t dtype = 0;
  std::int32_t op = 0;
  std::int32_t root = 0;
  std::uint64_t count = 0;

  bool operator==(const Signature&) const = default;
};

struct Message {
  Signature signature;
  Bytes payload;
};

class Mesh {
 public:
  Mesh() = default;
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;
  ~Mesh();

  int rank() const { return rank_; }
  int n_ranks() const { return n_ranks_; }

  // Blocks until all ranks are there; "" if they are, else what went wrong. `id` is the
  // communicator's, equal on all ranks and never used by another one.
  std::string connect(const std::string& id, int rank, int n_ranks);

  // To this rank too. A peer that is gone gets nothing, and nobody is told.
  void send(int peer, MessageKind kind, const Signature& signature, const std::byte* payload,
            std::size_t bytes);
  // Blocks until the next message of that kind is there; none when aborted.
  std::optional<Message> receive(int peer, MessageKind kind);

  // Whether a peer's process ended without a goodbye.
  bool has_lost_peer() const { return has_lost_peer_.load(std::memory_order_relaxed); }
  bool is_aborted() const { return is_aborted_.load(std::memory_order_relaxed); }
  // Blocks until abort().
  void wait_for_abort();
  // Wakes all that wait, for good.
  void abort();
  // Tells the peers that this rank leaves, which they need not mind.
  void say_goodbye();

 private:
  struct Peer {
    int socket = -1;
    std::thread reader;  // started under mutex_
    std::mutex sending;
    std::deque<Message> received[kMessageKinds];  // guarded by mutex_
  };

  std::string listen();
  int connect_to(int peer);
  std::optional<int> accept_one(int* peer);
  bool start_readers();
  void read_all(int peer);
  void deliver(int peer, MessageKind kind, Message message);

  // Constant once connect() has set them.
  std::string id_;
  int rank_ = -1;
  int n_ranks_ = 0;
  std::deque<Peer> peers_;  // made under mutex_; the sockets are connect()'s and the destructor's
  int listener_ = -1;
  // Only flags: what they stand for is read under mutex_, or waits on a socket that is shut down.
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> has_lost_peer_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace horon::simulator
