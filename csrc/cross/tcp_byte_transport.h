// Bytes between hosts over connections of our own, one for each two ranks.
//
// Note [On the caller's thread]
// Whoever exchanges bytes sends and receives them itself, of all peers at once and as the sockets
// take and have them: no thread has to be woken and nothing is copied on the way. While nothing
// moves it looks again for a short while, giving up its core in between, and then sleeps in poll().
// A peer that dies closes its connections, which is known at once; a host that is gone is noticed
// as let_peer_be_late() says, or at the deadline.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/closed_in_child.h"
#include "cross/byte_transport.h"
#include "cross/greeting.h"
#include "watch/long_wait.h"

namespace horon {

class TcpByteTransport final : public ByteTransport {
 public:
  // `peers`: everybody else, as meet_everybody() returned them.
  TcpByteTransport(int rank, int n_ranks, std::vector<RemotePeer> peers);

  void exchange(const SentSpans& send, const ReceivedSpans& receive,
                const WaitContext& context) override;
  void all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                  const WaitContext& context) override;
  void abort(const std::string& reason) override;
  void depart() override;

 private:
  // Before each message: what an exchange of one rank sends and another does not expect is an
  // error.
  struct Head {
    std::uint64_t number = 0;  // of the exchange
    std::uint64_t bytes = 0;
  };
  struct Connection {
    RemotePeer peer;
    std::unique_ptr<ClosedInChild> guard;
    // Of the running exchange, heads included:
    Head sent_head;
    ConstSpan to_send;
    std::size_t sent = 0;
    Head received_head;
    Span to_receive;
    std::size_t received = 0;

    bool has_sent() const { return to_send.bytes == 0 || sent == sizeof(Head) + to_send.bytes; }
    bool has_received() const {
      return to_receive.bytes == 0 || received == sizeof(Head) + to_receive.bytes;
    }
    bool is_done() const { return has_sent() && has_received(); }
  };

  // Move what they can without waiting; whether that was anything. Throw PeerLostError.
  bool send_some(Connection& connection);
  bool receive_some(Connection& connection);
  [[noreturn]] void lose(const Connection& connection, const std::string& why);
  void check_head(const Connection& connection) const;
  // Throws at the deadline (TimeoutError, which names whom it waits for), after abort(), and what
  // the context throws.
  void look_around(const WaitContext& context, LongWait& long_wait);
  Waiting what_is_awaited(const WaitContext& context) const;
  // Until a socket can go on, or for a while.
  void wait(const WaitContext& context, LongWait& long_wait);
  void check_aborted();

  const int rank_;
  std::vector<Connection> connections_;  // by rank, without this one
  std::uint64_t number_ = 0;
  std::mutex mutex_;
  std::string aborted_;  // guarded by mutex_
};

}  // namespace horon
