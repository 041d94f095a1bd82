#include "shm/shm_transport.h"

#include "catch.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

Transports make_with(const Options& options, int n_ranks) {
  auto group = std::make_shared<LocalGroup>(n_ranks, options);
  Transports transports;
  for (int rank = 0; rank < n_ranks; ++rank) {
    transports.by_rank.push_back(
        std::make_unique<ShmTransport>(group->segment(rank), group->peers(rank)));
  }
  transports.shared = std::move(group);
  return transports;
}

Transports make_shm(int n_ranks) { return make_with(small_options(), n_ranks); }

Transports make_without_inline(int n_ranks) {
  Options options = small_options();
  options.inline_bytes = 0;
  return make_with(options, n_ranks);
}

Transports make_claiming(int n_ranks) {
  Options options = small_options();
  options.claiming = "on";
  return make_with(options, n_ranks);
}

Transports make_not_claiming(int n_ranks) {
  Options options = small_options();
  options.claiming = "off";
  return make_with(options, n_ranks);
}

}  // namespace

TEST_CASE("shm: all kinds, dtypes and sizes") { test_all_kinds(make_shm); }
TEST_CASE("shm: all dtypes and ops") { test_all_ops(make_shm); }
TEST_CASE("shm: all kinds, dtypes and sizes, claiming") { test_all_kinds(make_claiming); }
TEST_CASE("shm: all dtypes and ops, claiming") { test_all_ops(make_claiming); }
TEST_CASE("shm: all kinds, dtypes and sizes, not claiming") { test_all_kinds(make_not_claiming); }
TEST_CASE("shm: all dtypes and ops, not claiming") { test_all_ops(make_not_claiming); }
TEST_CASE("shm: mixed with mismatches, claiming") { test_mixed_with_mismatches(make_claiming); }
TEST_CASE("shm: mixed with mismatches, not claiming") {
  test_mixed_with_mismatches(make_not_claiming);
}
TEST_CASE("shm: a mismatch fails one call and the next works") {
  test_mixed_with_mismatches(make_shm);
}
TEST_CASE("shm: the same without inline messages") {
  test_mixed_with_mismatches(make_without_inline);
}
TEST_CASE("shm: a tensor in pieces, claiming") { test_pieces(make_claiming); }
TEST_CASE("shm: a tensor in pieces, not claiming") { test_pieces(make_not_claiming); }
TEST_CASE("shm: factors of each rank") { test_premul_factors(make_shm); }
TEST_CASE("shm: a refusal names the rank") { test_refusal_names_the_rank(make_shm); }
TEST_CASE("shm: abort") { test_abort(make_shm); }
TEST_CASE("shm: timeout") { test_timeout(make_shm); }
TEST_CASE("shm: interrupt") { test_interrupt(make_shm); }

TEST_CASE("shm: tensors that are together larger than the caches") {
  Options options;
  options.claiming = "off";
  for (const int n : {2, 3}) {
    const Transports transports = make_with(options, n);
    require_no_errors(run_ranks(n, [&](int rank) {
      const std::uint64_t least =
          (std::uint64_t{24} << 20) / sizeof(float) / static_cast<std::uint64_t>(n);
      for (const std::uint64_t more : {1, 17, 262147}) {
        Plan plan = all_reduce_plan(n, least + more);
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)], plan, rank);
        plan.kind = OpKind::kReduce;
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)], plan, rank);
      }
    }));
  }
}

TEST_CASE("shm: sizes around every boundary of an odd buffer") {
  Options options = small_options();
  options.buffer_bytes = 4096 + 64;
  for (const int n : {3, 5}) {
    const Transports transports = make_with(options, n);
    require_no_errors(run_ranks(n, [&](int rank) {
      for (std::uint64_t count = 1000; count < 1100; ++count) {
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)],
                      all_reduce_plan(n, count), rank);
      }
    }));
  }
}

TEST_CASE("shm: a rank that leaves right after its last call fails nobody") {
  const int n_rounds = kHasThreadSanitizer ? 30 : 150;
  for (int round = 0; round < n_rounds; ++round) {
    const Transports transports = make_shm(3);
    const Errors errors = run_ranks(3, [&](int rank) {
      Transport& transport = *transports.by_rank[static_cast<std::size_t>(rank)];
      run_and_check(transport, all_reduce_plan(3, 2000), rank);
      run_and_check(transport, all_reduce_plan(3, 2), rank);
      if (rank == 0) {
        transport.depart();
      }
    });
    require_no_errors(errors);
  }
}

TEST_CASE("shm: a call without a rank that left is an error with operation and rank") {
  const Transports transports = make_shm(3);
  transports.by_rank[1]->depart();
  const Errors errors = run_ranks(3, [&](int rank) {
    if (rank != 1) {
      RankCall call(all_reduce_plan(3, 5), rank);
      transports.by_rank[static_cast<std::size_t>(rank)]->run(call.request, patient_context());
    }
  });
  for (const std::size_t rank : {0, 2}) {
    INFO(text_of(errors[rank]));
    REQUIRE(threw<GroupError>(errors[rank]));
    REQUIRE(contains(text_of(errors[rank]), "all_reduce #0"));
    REQUIRE(contains(text_of(errors[rank]), "rank 1 (pid "));
    REQUIRE(contains(text_of(errors[rank]), "left the group"));
  }
}

TEST_CASE("shm: a peer that dies in the middle of a stream of calls") {
  auto group = std::make_shared<LocalGroup>(3);
  group->make_mortal();
  const Errors errors = run_ranks(3, [&](int rank) {
    ShmTransport transport(group->segment(rank), group->peers(rank));
    for (int i = 0; i < 1000000; ++i) {
      if (rank == 2 && i == 25) {
        group->kill(2);
        return;
      }
      run_and_check(transport, all_reduce_plan(3, 1500), rank);
    }
  });
  REQUIRE(!errors[2]);
  for (const std::size_t rank : {0, 1}) {
    INFO(text_of(errors[rank]));
    REQUIRE(contains(text_of(errors[rank]), "rank 2 (pid "));
    REQUIRE(contains(text_of(errors[rank]), "died"));
    REQUIRE(contains(text_of(errors[rank]), "all_reduce #25"));
  }
}

TEST_CASE("shm: rank 0 of a monitored barrier tells who is missing, the others what it said") {
  const Transports transports = make_shm(4);
  const Errors errors = run_ranks(4, [&](int rank) {
    if (rank == 2) {
      return;
    }
    Request request;
    request.kind = OpKind::kMonitoredBarrier;
    // The others have a later deadline, as monitored_barrier_timeout gives them, and hear from rank
    // 0.
    const WaitContext context{rank == 0 ? Deadline::after(std::chrono::seconds(1)) : patient(),
                              nullptr};
    transports.by_rank[static_cast<std::size_t>(rank)]->run(request, context);
  });
  REQUIRE(
      contains(text_of(errors[0]), "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1000 ms."));
  for (const std::size_t rank : {1, 3}) {
    INFO(text_of(errors[rank]));
    REQUIRE(contains(text_of(errors[rank]),
                     concat("Rank ", rank, " successfully reached monitoredBarrier")));
    REQUIRE(contains(text_of(errors[rank]), "Rank 2 failed to pass"));
  }
}
