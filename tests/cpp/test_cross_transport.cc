#include "cross/cross_transport.h"

#include <condition_variable>
#include <mutex>

#include "catch.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

// Where the fakes of all ranks meet. A round: everybody offers, everybody takes, the last one
// clears.
class Exchange {
 public:
  explicit Exchange(int n_ranks) : offers_(static_cast<std::size_t>(n_ranks)) {}

  struct Offer {
    const std::byte* data = nullptr;
    std::vector<std::uint64_t> bytes;  // by destination, one after another in `data`
  };

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
    exchange_->run_round(rank_, {send, {bytes}}, context, [&](const auto& offers) {
      for (std::size_t source = 0; source < offers.size(); ++source) {
        expect(offers[source].bytes == std::vector<std::uint64_t>{bytes},
               "all_gather sizes differ");
        std::memcpy(receive + source * bytes, offers[source].data, bytes);
      }
    });
  }

  void all_to_all(const std::byte* send, const std::vector<std::uint64_t>& send_bytes,
                  std::byte* receive, const std::vector<std::uint64_t>& receive_bytes,
                  const WaitContext& context) override {
    expect(send_bytes.size() == n_ranks_ && receive_bytes.size() == n_ranks_,
           "wrong number of sizes");
    exchange_->run_round(rank_, {send, send_bytes}, context, [&](const auto& offers) {
      for (std::size_t source = 0; source < offers.size(); ++source) {
        const auto& [data, bytes] = offers[source];
        std::uint64_t offset = 0;
        for (std::size_t destination = 0; destination < static_cast<std::size_t>(rank_);
             ++destination) {
          offset += bytes[destination];
        }
        const std::uint64_t size = bytes[static_cast<std::size_t>(rank_)];
        expect(size == receive_bytes[source], "rank ", source, " sends ", size, ", expected ",
               receive_bytes[source]);
        if (size > 0) {
          std::memcpy(receive, data + offset, size);
          receive += size;
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

Transports make_cross(int n_ranks) {
  Transports transports;
  const auto exchange = std::make_shared<Exchange>(n_ranks);
  for (int rank = 0; rank < n_ranks; ++rank) {
    transports.by_rank.push_back(std::make_unique<CrossTransport>(
        std::make_shared<FakeByteTransport>(exchange, rank, n_ranks), rank, n_ranks));
  }
  return transports;
}

}  // namespace

TEST_CASE("cross: all kinds, dtypes and sizes") { test_all_kinds(make_cross); }
TEST_CASE("cross: all dtypes and ops") { test_all_ops(make_cross); }
TEST_CASE("cross: a mismatch fails one call and the next works") {
  test_mixed_with_mismatches(make_cross);
}
TEST_CASE("cross: factors of each rank") { test_premul_factors(make_cross); }
TEST_CASE("cross: a refusal names the rank") { test_refusal_names_the_rank(make_cross); }
TEST_CASE("cross: abort") { test_abort(make_cross); }
TEST_CASE("cross: timeout") { test_timeout(make_cross); }
TEST_CASE("cross: interrupt") { test_interrupt(make_cross); }

TEST_CASE("cross: more than a piece of 4 MiB per pair") {
  // Per rank and destination; the odd rest makes the last piece short.
  constexpr std::uint64_t kCount = (std::uint64_t{4} << 20) / 4 + 12345;
  for (const int n : {1, 2}) {
    const Transports transports = make_cross(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatterSingle,
                                OpKind::kAllToAllSingle, OpKind::kBroadcast}) {
        Plan plan;
        plan.kind = kind;
        plan.n_ranks = n;
        plan.count = pattern(kind) == Pattern::kReduceToAll ? kCount * static_cast<std::uint64_t>(n)
                                                            : kCount;
        plan.is_uneven = kind == OpKind::kAllToAllSingle;
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)], plan, rank);
      }
    }));
  }
}

TEST_CASE("cross: a carrier that fails ends the group with its reason") {
  class Broken final : public ByteTransport {
   public:
    void all_gather(const std::byte*, std::byte*, std::size_t, const WaitContext&) override {
      throw Error("the cable is out");
    }
    void all_to_all(const std::byte*, const std::vector<std::uint64_t>&, std::byte*,
                    const std::vector<std::uint64_t>&, const WaitContext&) override {}
    void abort(const std::string&) override {}
  };
  for (const OpKind kind : {OpKind::kBarrier, OpKind::kMonitoredBarrier}) {
    for (int rank = 0; rank < 2; ++rank) {
      CrossTransport transport(std::make_shared<Broken>(), rank, 2);
      Request request;
      request.kind = kind;
      for (int attempt = 0; attempt < 2; ++attempt) {
        const std::exception_ptr error =
            error_of([&] { transport.run(request, patient_context()); });
        INFO(text_of(error));
        REQUIRE(threw<GroupError>(error));
        REQUIRE(contains(text_of(error), "the cable is out"));
      }
    }
  }
}
