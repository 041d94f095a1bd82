// A carrier of bytes through this process's memory.
#pragma once

#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "cross/byte_transport.h"
#include "rank_threads.h"

namespace horon::testing {

// Where the fakes of all ranks meet. A round: everybody offers, everybody takes, the last one
// clears.
class Exchange {
 public:
  explicit Exchange(int n_ranks) : offers_(static_cast<std::size_t>(n_ranks)) {}

  using Offer = SentSpans;

  // take(offers) is called under the lock when all have offered.
  void run_round(int rank, Offer offer, const WaitContext& context,
                 const std::function<void(const std::vector<Offer>&)>& take) {
    std::unique_lock lock(mutex_);
    const std::uint64_t round = round_;
    offers_[static_cast<std::size_t>(rank)] = std::move(offer);
    if (++n_inside_ == offers_.size()) {
      is_taking_ = true;
      changed_.notify_all();
    }
    await(lock, context, [&] { return is_taking_; });
    take(offers_);
    if (--n_inside_ == 0) {
      is_taking_ = false;
      ++round_;
      changed_.notify_all();
    }
    // Until then the others still read this rank's memory.
    await(lock, context, [&] { return round_ > round; });
  }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    aborted_ = reason;
    changed_.notify_all();
  }

 private:
  // A rank that gives up ends the exchange, since the others must not read its memory any more.
  template <typename Ready>
  void await(std::unique_lock<std::mutex>& lock, const WaitContext& context, const Ready& ready) {
    while (true) {
      if (!aborted_.empty()) {
        throw GroupError(aborted_);
      }
      if (ready()) {
        return;
      }
      changed_.wait_for(lock, std::chrono::milliseconds(20));
      try {
        if (context.deadline.has_passed()) {
          throw TimeoutError("the fake timed out");
        }
        if (context.check_interrupt != nullptr) {
          (*context.check_interrupt)();
        }
      } catch (...) {
        aborted_ = "a rank gave up";
        changed_.notify_all();
        throw;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::vector<Offer> offers_;
  std::size_t n_inside_ = 0;
  std::uint64_t round_ = 0;
  bool is_taking_ = false;
  std::string aborted_;
};

// One rank's carrier of bytes, through this process's memory.
class FakeByteTransport final : public ByteTransport {
 public:
  FakeByteTransport(std::shared_ptr<Exchange> exchange, int rank, int n_ranks)
      : exchange_(std::move(exchange)), rank_(rank), n_ranks_(static_cast<std::size_t>(n_ranks)) {}

  void all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                  const WaitContext& context) override {
    ReceivedSpans to;
    for (std::size_t source = 0; source < n_ranks_; ++source) {
      to.push_back({receive + source * bytes, bytes});
    }
    exchange(SentSpans(n_ranks_, {send, bytes}), to, context);
    std::memcpy(receive + static_cast<std::size_t>(rank_) * bytes, send, bytes);
  }

  void exchange(const SentSpans& send, const ReceivedSpans& receive,
                const WaitContext& context) override {
    expect(send.size() == n_ranks_ && receive.size() == n_ranks_, "wrong number of spans");
    exchange_->run_round(rank_, send, context, [&](const auto& offers) {
      for (std::size_t source = 0; source < offers.size(); ++source) {
        const ConstSpan& offer = offers[source][static_cast<std::size_t>(rank_)];
        if (static_cast<int>(source) == rank_) {
          continue;
        }
        expect(offer.bytes == receive[source].bytes, "rank ", source, " sends ", offer.bytes,
               ", expected ", receive[source].bytes);
        if (offer.bytes > 0) {
          std::memcpy(receive[source].data, offer.data, offer.bytes);
        }
      }
    });
  }

  void abort(const std::string& reason) override { exchange_->abort(reason); }

 private:
  const std::shared_ptr<Exchange> exchange_;
  const int rank_;
  const std::size_t n_ranks_;
};

}  // namespace horon::testing
