// The work of one stream: entries that a thread of its own runs one after another.
//
// Thread safety: every function may be called from any thread; wait() never from the queue's own.
// Ownership: shared, because events hold places in queues whose streams are gone.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace horon::simulator {

class StreamQueue {
 public:
  // Of an entry: 1 for the first. 0 is done from the beginning.
  using Ticket = std::uint64_t;

  StreamQueue();
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;
  // Requires that nothing was submitted, or that try_join() was true.
  ~StreamQueue() = default;

  // Never blocks. The entry may block the queue for as long as it likes.
  Ticket submit(std::function<void()> work);
  // The ticket of the newest entry.
  Ticket last() const;
  bool is_done(Ticket ticket) const;
  void wait(Ticket ticket) const;

  // No entry comes any more: the thread ends after the last one.
  void close();
  // Joins the thread if it has ended.
  bool try_join();

 private:
  void run();
  void delay();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<std::function<void()>> entries_;
  Ticket submitted_ = 0;
  Ticket done_ = 0;
  bool is_closed_ = false;
  bool has_ended_ = false;
  std::thread worker_;  // started by the first entry
  // The worker's alone.
  std::minstd_rand random_;
};

// A place in a queue.
struct Mark {
  std::shared_ptr<StreamQueue> queue;
  StreamQueue::Ticket ticket = 0;

  bool is_done() const { return queue == nullptr || queue->is_done(ticket); }
  void wait() const {
    if (queue != nullptr) {
      queue->wait(ticket);
    }
  }
};

}  // namespace horon::simulator
