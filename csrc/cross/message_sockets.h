// All connections of one rank that carry point-to-point messages between hosts, and somebody who
// watches them while everybody else sleeps.
//
// Note [Watching sockets]
// Who waits for messages sleeps on a word in shared memory, which ranks of the same host ring. A
// socket rings nothing. So before it sleeps it arms the watch: a thread that sleeps on all sockets
// at once, and rings once when one of them has something or takes more. It is armed by one system
// call and is not woken while nobody sleeps, however much comes. The thread exists from the first
// time that it is needed.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/closed_in_child.h"
#include "core/unique_fd.h"
#include "cross/message_socket.h"

namespace horon {

class MessageSockets {
 public:
  // `n_ranks` of the group; `peers`: the connections, at most one for each rank. `ring` is called
  // on the watch's thread.
  MessageSockets(int n_ranks, std::vector<RemotePeer> peers, std::function<void()> ring);
  // In a forked child the thread is somebody else's.
  ~MessageSockets();
  MessageSockets(const MessageSockets&) = delete;
  MessageSockets& operator=(const MessageSockets&) = delete;

  // Null for ranks that are reached in another way.
  MessageSocket* at(int rank) { return by_rank_[static_cast<std::size_t>(rank)].get(); }

  // These, as MessageSocket's, from one thread at a time: gives `sink` what has come on any of
  // them, and flushes those that take more. Whether anything moved; `has_ended` turns true if a
  // connection has.
  bool receive(MessageSink& sink, bool* has_ended);
  // Sends what was put. Whether something moved.
  bool flush(MessageSocket& socket);
  bool is_flushed() const;
  // Whether the peers' systems have all that was put, as far as they still take anything.
  bool is_delivered() const;
  // Every one.
  void put(const Frame& frame, const std::byte* payload = nullptr);
  void shut();

  // Any thread: whether receive() would do something.
  bool has_something() const;
  // Any thread. False if there is no thread that watches.
  bool arm();
  // Ends the thread. Idempotent.
  void stop();

 private:
  void watch();
  // What the watch waits for of a socket.
  void want(int operation, MessageSocket& socket, bool room);

  std::vector<std::unique_ptr<MessageSocket>> by_rank_;
  std::vector<bool> wants_room_;  // by rank
  std::vector<bool> is_watched_;  // by rank
  const std::function<void()> ring_;
  UniqueFd ready_;  // an epoll of all sockets
  UniqueFd armed_;  // an epoll of `ready_`, once, and of `stop_`
  UniqueFd stop_;   // an eventfd
  std::vector<std::unique_ptr<ClosedInChild>> guards_;
  std::mutex mutex_;
  bool is_stopped_ = false;     // guarded by mutex_
  bool has_no_thread_ = false;  // guarded by mutex_
  std::thread thread_;          // guarded by mutex_
};

}  // namespace horon
