// Point-to-point messages between the ranks of a group: through memory with those that share it,
// over connections with the others.
//
// Note [Point-to-point]
// Messages are matched by (source, tag), in the order in which they were sent; they have nothing to
// do with the order of collectives. Small ones travel at once (eager); larger ones announce
// themselves and stream when a receive has met them (rendezvous), so an unreceived large message
// blocks nobody. A send is done when its receive has met it: only then is it known that the sizes
// agree, and a difference fails both ends. An eager send that nobody has met for a second counts as
// buffered and is done, so that two ranks that both send first do not hang.
//
// Note [Who moves messages]
// Whoever starts an operation, waits for one or polls; and one background thread, which exists from
// the first operation that could not finish at once. A caller that waits moves its messages itself
// and sees this rank's doorbell change, a word that peers ring when there may be something new. The
// thread leaves new operations to their callers for a millisecond, because most come to wait within
// microseconds and waking a thread costs more than a message. What is still pending then, and
// nobody waits for, is the thread's: it is counted as a sleeper on the doorbell, so that a ring
// makes a system call to wake it. It stays awake for a short while after the last operation,
// looking up every millisecond; then it sleeps until there is one. A callback on that thread that
// asks for something to be watched may go on to wait for it without coming by here, and would wait
// for its own thread: another one takes its place, and it ends when it has come back. A caller that
// waits counts as none while a callback keeps it, and what has finished behind that callback is
// anybody's to deliver. Where the system gives no thread, callers look after deaths and deadlines,
// too.
//
// Note [Messages between hosts]
// Rings and connections carry the same frames, so that a receive from any source meets whatever
// comes first from wherever. A connection takes what the system has room for, so the payload of a
// large message is sent from where it lies and received where it belongs. How sockets wake who
// sleeps: Note [Watching sockets] in message_sockets.h. That a rank of another host leaves, or that
// the group has ended, is told by frames; a connection that ends without is a rank that died.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/function_ref.h"
#include "core/wait_context.h"
#include "cross/message_sockets.h"
#include "p2p/p2p_message.h"
#include "shm/peers.h"
#include "shm/ring.h"
#include "shm/shared_store.h"
#include "shm/wait_policy.h"
#include "watch/long_wait.h"

namespace horon {

// The ranks of a group that spans hosts, as one of them sees it.
struct P2pRoster {
  int rank = 0;
  std::vector<int> local;          // by rank: its number in the segment; -1: on another host
  std::vector<int> global_ranks;   // by rank; for messages
  std::vector<RemotePeer> remote;  // a connection to each rank on another host
  // Called with the reason when a message's failure, or another rank, has ended the group. Must not
  // call the engine.
  std::function<void(const std::string& reason)> on_end;
};

// Thread safety: all methods, from any thread.
// Ownership: make it with std::make_shared; the background thread holds a share.
class P2pEngine : public std::enable_shared_from_this<P2pEngine> {
 public:
  // Ownership: `segment` and `peers` outlive the engine.
  P2pEngine(Segment* segment, const Peers* peers, std::size_t eager_bytes);
  // The same where `segment` is shared with some of the ranks, or with none.
  P2pEngine(Segment* segment, const Peers* peers, std::size_t eager_bytes, P2pRoster roster);
  // Requires close() before, but in a forked child.
  ~P2pEngine();
  P2pEngine(const P2pEngine&) = delete;
  P2pEngine& operator=(const P2pEngine&) = delete;

  // Starts the operation; it may complete before this returns. Throws GroupError when closed.
  void start(const std::shared_ptr<P2pOp>& op);

  // Moves messages on this thread until `is_done()`, which is called with no lock held and must
  // turn true when some operation completes. Throws what check_interrupt throws. `waiter`: whom
  // that operation knows (P2pOp::is_for), for reports of waits that last; may be null.
  void help_until(FunctionRef<bool()> is_done, const std::function<void()>* check_interrupt,
                  const void* waiter = nullptr);

  // Moves what can be moved now.
  void poll();

  // Nobody will come to wait for what is pending: the background thread is to watch at once; in a
  // callback on that thread, another one. False if the system gives no thread: then somebody has to
  // help.
  bool watch();

  // Tells everybody that the group has ended; close() is next.
  void abort(const std::string& reason);

  // Lets sends finish until the deadline, fails what is left and ends the thread. Idempotent.
  void close(const Deadline& drain_until, const std::string& reason);

 private:
  using Op = std::shared_ptr<P2pOp>;

  // To one peer: a ring, or a socket.
  struct Outgoing {
    std::unique_ptr<Ring> ring;
    MessageSocket* socket = nullptr;
    std::size_t streamed_bytes = 0;  // of the first message, that the socket is sending
    std::deque<Frame> control;       // goes first; never has a payload
    std::deque<Op> messages;         // eager messages, requests to send and streams, in order
  };

  // All of these require the lock.
  bool pump();
  bool pump_out(int peer);
  // `must_tell`: the peer may wait for the room that there is now, and has not been told.
  bool pump_in(int peer, bool* must_tell);
  bool write_message(Ring& ring, const Op& op, bool* finished);
  bool pump_out_socket(Outgoing& out);
  void end_streamed(Outgoing& out);
  void put_messages(Outgoing& out);
  bool pump_sockets();
  // `Source` gives the payload: a Ring, or bytes that a socket has brought.
  template <typename Source>
  void handle(int source, const Frame& frame, Source& payload);
  template <typename Source>
  void arrived(int source, const Frame& frame, Source& payload);
  void handle_data(int source, const Frame& frame, Ring& ring);
  void end_part(int source, const Frame& frame);
  void forget(const Op& op);
  void forget_streamed();
  void say_end(const std::string& reason);
  void say_goodbye(const Deadline& deadline, std::unique_lock<std::mutex>& lock);
  class Sink;
  bool match_unexpected(const Op& receive);
  void meet(const Op& receive, UnexpectedMessage message);
  void start_send(const Op& op);
  void finish(const Op& op, std::exception_ptr error = nullptr);
  void fail_all(const std::string& reason);
  void look_around();
  struct Fates;
  Fates look_at_peers() const;
  std::exception_ptr verdict(const P2pOp& op, int peer, const Fates& fates) const;
  std::string describe(int peer) const;
  // " died", of one that has not left and is not there.
  std::string how_lost(int peer) const;
  bool is_with_peer(const P2pOp& op) const;
  // The pending operation that `waiter` waits for; null: none.
  Op find_awaited(const void* waiter) const;
  void look_at_wait(LongWait& wait, const P2pOp& op) const;
  bool is_busy() const;
  bool has_work() const { return is_busy() || has_callbacks(); }
  bool is_awaited(int peer) const;
  bool is_sending() const { return !sends_.empty(); }
  // Takes no lock: a hint.
  bool has_incoming() const;
  void ring_doorbell(int peer);
  void ring_own_doorbell();
  // Before a sleep on the own doorbell: how long it may last.
  std::chrono::milliseconds arm_sockets(std::chrono::milliseconds limit);

  // See Note [Who moves messages]. All of these require the lock.
  void tell_background();
  void count_background(bool is_counted);
  bool on_background_thread() const { return background_.get_id() == std::this_thread::get_id(); }
  // On the background thread, in a callback: is no longer that. False if there is no other one.
  bool replace_background();
  void join_ended();
  void background_loop();
  // Where there is no background thread: looks around in its place, now and then.
  void stand_in();
  // The loop of help_until(). What it throws may come with the lock or without.
  void help(FunctionRef<bool()> is_done, const std::function<void()>* check_interrupt,
            const void* waiter, std::unique_lock<std::mutex>& lock);
  // Whether a peer of a pending message was last seen on this core. Takes the lock.
  bool is_core_needed();
  enum class Caller { kHelper, kOther };  // kHelper: is counted in helpers_
  // Completes what has finished and calls back, without the lock, and takes the lock again.
  void deliver(std::unique_lock<std::mutex>& lock, Caller caller = Caller::kOther);
  bool has_callbacks() const { return !finished_.empty() || !left_.empty(); }

  Segment* const segment_;
  const Peers* const peers_;
  const std::size_t eager_bytes_;
  const int rank_;
  const std::vector<int> local_;         // as P2pRoster::local
  const std::vector<int> global_ranks_;  // as P2pRoster::global_ranks
  const std::function<void(const std::string& reason)> on_end_;

  std::mutex mutex_;
  // Guarded by mutex_:
  std::condition_variable became_busy_;
  std::condition_variable sends_drained_;
  std::vector<Outgoing> outgoing_;                       // by peer
  std::vector<std::unique_ptr<Ring>> incoming_;          // by peer
  std::map<std::uint64_t, Op> sends_;                    // not yet done, by id
  std::list<Op> receives_;                               // posted, not yet met, in order
  std::map<std::pair<int, std::uint64_t>, Op> streams_;  // receives being filled, by (source, id)
  std::list<UnexpectedMessage> unexpected_;              // in order of arrival
  std::vector<std::uint64_t> eager_in_flight_;           // bytes not yet met, by peer
  std::deque<Op> finished_;                              // not yet completed
  std::deque<Op> left_;                                  // completed, not yet called back for
  SharedStore store_;
  std::uint64_t next_id_ = 1;
  std::uint64_t calls_ = 0;          // that left something pending
  bool background_watches_ = false;  // is asleep on the doorbell, or about to be
  bool background_counts_ = false;   // as one of the doorbell's waiters
  std::string closed_;               // not empty: why nothing can be started
  bool has_news_ = false;            // of peers, from sockets: look_around() is due
  Clock::time_point next_look_;      // around, by time
  bool has_said_end_ = false;        // to peers on other hosts
  bool stop_thread_ = false;
  std::thread background_;
  std::list<std::thread> replaced_;          // were background_; end when they have come back
  std::vector<std::thread::id> have_ended_;  // of these

  // Callers inside help_until(), but not in a callback. The background thread looks at it without
  // the lock while it spins.
  std::atomic<int> helpers_{0};

  std::unique_ptr<MessageSockets> sockets_;  // null: all ranks share memory
};

}  // namespace horon
