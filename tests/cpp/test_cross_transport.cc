#include "cross/cross_transport.h"

#include "catch.h"
#include "fake_bytes.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

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
    void exchange(const SentSpans&, const ReceivedSpans&, const WaitContext&) override {}
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
