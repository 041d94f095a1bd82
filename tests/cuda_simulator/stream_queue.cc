#include "stream_queue.h"

#include <atomic>
#include <chrono>
#include <random>

#include "quiet_thread.h"
#include "settings.h"

namespace horon::simulator {
namespace {

std::uint64_t next_seed() {
  static std::atomic<std::uint64_t> n_queues{0};
  return settings().seed + n_queues.fetch_add(1, std::memory_order_relaxed);  // only a number
}

}  // namespace

StreamQueue::StreamQueue() : random_(static_cast<std::minstd_rand::result_type>(next_seed())) {}

StreamQueue::Ticket StreamQueue::submit(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(work));
  if (!worker_.joinable()) {
    worker_ = quiet_thread([this] { run(); });
  }
  changed_.notify_all();
  return ++submitted_;
}

StreamQueue::Ticket StreamQueue::last() const {
  const std::lock_guard lock(mutex_);
  return submitted_;
}

bool StreamQueue::is_done(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  return done_ >= ticket;
}

void StreamQueue::wait(Ticket ticket) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
}

void StreamQueue::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

bool StreamQueue::try_join() {
  {
    const std::lock_guard lock(mutex_);
    if (worker_.joinable() && !has_ended_) {
      return false;
    }
  }
  if (worker_.joinable()) {
    worker_.join();
  }
  return true;
}

void StreamQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closed_ || !entries_.empty(); });
    if (entries_.empty()) {
      has_ended_ = true;
      return;
    }
    std::function<void()> work = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    delay();
    work();
    work = nullptr;  // what it holds is released before anyone learns that it is done
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void StreamQueue::delay() {
  const std::uint64_t max_us = settings().max_delay_us;
  if (max_us > 0) {
    const std::uint64_t us = std::uniform_int_distribution<std::uint64_t>(0, max_us)(random_);
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
}

}  // namespace horon::simulator
