#include "nccl/communicator.h"

#include <future>

#include "catch.h"
#include "fake_nccl.h"
#include "nccl/unique_id_exchange.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

using Calls = std::vector<std::string>;

std::unique_ptr<Communicator> connected(FakeNccl& nccl) {
  NcclConfig config;
  config.name = "test";
  auto made = Communicator::connect(nccl, {}, 1, 4, config, patient());
  nccl.take_calls();
  return made;
}

}  // namespace

TEST_CASE("communicator: connect polls until NCCL is ready, and closing frees it once") {
  FakeNccl nccl;
  nccl.stay_in_progress(5);
  NcclUniqueId id;
  id.bytes.fill(9);
  auto communicator = Communicator::connect(nccl, id, 1, 4, {}, patient());
  REQUIRE(communicator->rank() == 1);
  REQUIRE(communicator->n_ranks() == 4);
  REQUIRE(nccl.take_calls() == Calls{"comm_init 1/4 id=9"});
  REQUIRE(nccl.polls() == 6);
  communicator->finalize(patient());
  communicator->finalize(patient());
  communicator->abort("too late");
  communicator.reset();
  REQUIRE(nccl.take_calls() == Calls{"comm_finalize", "comm_destroy"});
  REQUIRE(nccl.violations().empty());
}

TEST_CASE("communicator: a rank that never comes is a timeout that names this rank") {
  FakeNccl nccl;
  nccl.stay_in_progress(kForEver);
  NcclConfig config;
  config.name = "dp";
  const auto error = error_of([&] { Communicator::connect(nccl, {}, 1, 4, config, soon()); });
  REQUIRE(threw<TimeoutError>(error));
  REQUIRE(contains(text_of(error), "communicator 'dp' of 4 ranks: rank 1 of 4 waited 150 ms"));
  REQUIRE(contains(text_of(error), "the fake's last error"));
  // What NCCL had made by then is given back.
  REQUIRE(nccl.take_calls() == Calls{"comm_init 1/4 id=0", "comm_abort #0"});
  REQUIRE(nccl.violations().empty());
}

TEST_CASE("communicator: errors name operation, call, rank and NCCL's words") {
  FakeNccl nccl;
  nccl.fail("comm_init", NcclResult::kSystemError);
  auto error = error_of([&] { Communicator::connect(nccl, {}, 2, 3, {}, patient()); });
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "ncclCommInitRankConfig failed on rank 2 of 3: error text 2"));
  REQUIRE(contains(text_of(error), "NCCL says: the fake's last error"));

  auto communicator = connected(nccl);
  const std::string operation = "all_reduce #7";
  {
    const Communicator::Use use(*communicator, operation);
    REQUIRE_NOTHROW(use.check(NcclResult::kInProgress, "ncclX"));
    error = error_of([&] { use.check(NcclResult::kInvalidArgument, "ncclX"); });
    REQUIRE(threw<UsageError>(error));
    REQUIRE(contains(text_of(error), "all_reduce #7: ncclX failed on rank 1 of 4"));
  }
  // Refused arguments change nothing; a dead peer ends it.
  {
    const Communicator::Use use(*communicator, operation);
    error = error_of([&] { use.check(NcclResult::kRemoteError, "ncclX"); });
    REQUIRE(threw<PeerLostError>(error));
  }
  error = error_of([&] { const Communicator::Use use(*communicator, operation); });
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "can not be used any more: all_reduce #7: ncclX failed"));
}

TEST_CASE("communicator: abort from another thread ends a wait, and only then frees") {
  FakeNccl nccl;
  auto communicator = connected(nccl);
  nccl.stay_in_progress(kForEver);
  std::promise<void> waiting;
  auto waiter = std::async(std::launch::async, [&] {
    const std::string operation = "all_reduce #1";
    return error_of([&] {
      const Communicator::Use use(*communicator, operation);
      use.check(nccl.all_reduce(nullptr, nullptr, 1, NcclDataType::kInt8, NcclReduceOp::kSum,
                                use.handle(), nullptr),
                "ncclAllReduce");
      waiting.set_value();
      use.await_ready(patient());
    });
  });
  waiting.get_future().wait();
  communicator->abort("rank 3 (host a, pid 7) died");
  const auto error = waiter.get();
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #1: aborted on rank 1: rank 3 (host a, pid 7)"));
  communicator->abort("another reason");
  REQUIRE(nccl.take_calls().back() == "comm_abort #0");
  REQUIRE(nccl.violations().empty());
  const std::string later = "barrier #2";
  const auto refused = error_of([&] { const Communicator::Use use(*communicator, later); });
  REQUIRE(contains(text_of(refused), "rank 3 (host a, pid 7) died"));
  REQUIRE_FALSE(communicator->check_async_error());  // over: there is nothing to ask any more
  REQUIRE_NOTHROW(communicator->finalize(patient()));
}

TEST_CASE("communicator: abort waits for a thread that is inside NCCL") {
  FakeNccl nccl;
  auto communicator = connected(nccl);
  nccl.block("all_reduce");
  auto caller = std::async(std::launch::async, [&] {
    const std::string operation = "all_reduce #1";
    return error_of([&] {
      const Communicator::Use use(*communicator, operation);
      use.check(nccl.all_reduce(nullptr, nullptr, 1, NcclDataType::kInt8, NcclReduceOp::kSum,
                                use.handle(), nullptr),
                "ncclAllReduce");
    });
  });
  nccl.await_blocked_caller();
  auto aborter = std::async(std::launch::async, [&] { communicator->abort("enough"); });
  REQUIRE(aborter.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
  nccl.unblock();
  aborter.get();
  caller.get();
  REQUIRE(nccl.violations().empty());
  REQUIRE(nccl.take_calls().back() == "comm_abort #0");
}

TEST_CASE("communicator: a thread that stays inside NCCL does not keep abort for ever") {
  FakeNccl nccl;
  auto communicator = connected(nccl);
  nccl.block("all_reduce");
  auto caller = std::async(std::launch::async, [&] {
    const std::string operation = "all_reduce #1";
    const Communicator::Use use(*communicator, operation);
    (void)nccl.all_reduce(nullptr, nullptr, 1, NcclDataType::kInt8, NcclReduceOp::kSum,
                          use.handle(), nullptr);
  });
  nccl.await_blocked_caller();
  communicator->abort("it hangs");
  REQUIRE(nccl.has_blocked_caller());  // ncclCommAbort is what lets it go, in NCCL
  nccl.unblock();
  caller.get();
}

TEST_CASE("communicator: the watching thread sees asynchronous errors, not progress") {
  FakeNccl nccl;
  auto communicator = connected(nccl);
  REQUIRE_FALSE(communicator->check_async_error());
  nccl.set_async_error(NcclResult::kInProgress);
  REQUIRE_FALSE(communicator->check_async_error());
  nccl.set_async_error(NcclResult::kRemoteError);
  const auto error = communicator->check_async_error();
  REQUIRE(error);
  REQUIRE(contains(*error, "on rank 1 of 4: error text 6"));
}

TEST_CASE("communicator: closing one that hangs aborts it, and says so") {
  FakeNccl nccl;
  auto communicator = connected(nccl);
  nccl.stay_in_progress(kForEver);
  REQUIRE_THROWS_AS(communicator->finalize(soon()), TimeoutError);
  REQUIRE(nccl.take_calls() == Calls{"comm_finalize", "comm_abort #0"});
  REQUIRE_NOTHROW(communicator->finalize(soon()));
  REQUIRE(nccl.violations().empty());
}

TEST_CASE("communicator: closing one that has failed aborts it") {
  FakeNccl nccl;
  auto communicator = connected(nccl);
  nccl.set_async_error(NcclResult::kRemoteError);
  const std::string operation = "send";
  REQUIRE_THROWS_AS(
      [&] {
        const Communicator::Use use(*communicator, operation);
        use.await_ready(patient());
      }(),
      PeerLostError);
  REQUIRE_THROWS_AS(communicator->finalize(patient()), GroupError);
  REQUIRE(nccl.take_calls() == Calls{"comm_abort #0"});
}

TEST_CASE("communicator: destroying one that is open aborts it") {
  FakeNccl nccl;
  connected(nccl).reset();
  REQUIRE(nccl.take_calls() == Calls{"comm_abort #0"});
}

TEST_CASE("communicator: split gives a child, or nothing without a color") {
  FakeNccl nccl;
  nccl.stay_in_progress(3);
  auto parent = connected(nccl);
  const auto child = parent->split(2, 5, {}, patient());
  REQUIRE(child);
  REQUIRE(child->rank() == 5);
  REQUIRE(child->n_ranks() == 4);
  REQUIRE_FALSE(parent->split(-1, 0, {}, patient()));
  REQUIRE(nccl.take_calls() == Calls{"comm_split color=2 key=5", "comm_split color=-1 key=0"});
  REQUIRE(nccl.violations().empty());  // the parent was ready before its second split
}

TEST_CASE("communicator: a split that hangs leaves nothing behind when the parent is aborted") {
  FakeNccl nccl;
  auto parent = connected(nccl);
  nccl.stay_in_progress(kForEver);
  REQUIRE_THROWS_AS(parent->split(0, 0, {}, soon()), TimeoutError);
  parent->abort("a peer hangs");
  REQUIRE(nccl.take_calls() == Calls{"comm_split color=0 key=0", "comm_abort #0", "comm_abort #1"});
  REQUIRE(nccl.violations().empty());
}

TEST_CASE("communicator: shrink leaves ranks out, with abort also after a failure") {
  FakeNccl nccl;
  auto parent = connected(nccl);
  REQUIRE(parent->shrink({3}, Communicator::Shrink::kIdle, {}, patient())->n_ranks() == 3);
  REQUIRE(nccl.take_calls()[0] == "comm_shrink -1");
  const std::string operation = "all_reduce";
  REQUIRE_THROWS_AS(Communicator::Use(*parent, operation).check(NcclResult::kRemoteError, "ncclX"),
                    PeerLostError);
  REQUIRE_THROWS_AS(parent->shrink({2, 3}, Communicator::Shrink::kIdle, {}, patient()), GroupError);
  REQUIRE(parent->shrink({2, 3}, Communicator::Shrink::kAbort, {}, patient())->n_ranks() == 2);
  REQUIRE(nccl.take_calls()[0] == "comm_shrink -2 abort");
  nccl.fail("comm_shrink", NcclResult::kInvalidUsage);
  REQUIRE_THROWS_AS(parent->shrink({3}, Communicator::Shrink::kAbort, {}, patient()), UsageError);
}

TEST_CASE("unique id: all ranks get rank 0's, and another one each time") {
  MemoryStore store;
  FakeNccl nccl;
  std::vector<std::vector<NcclUniqueId>> ids(3, std::vector<NcclUniqueId>(4));
  require_no_errors(run_ranks(4, [&](int rank) {
    for (auto& generation : ids) {
      generation[static_cast<std::size_t>(rank)] =
          exchange_unique_id(store, nccl, rank, 4, "device 0", patient());
    }
  }));
  for (const auto& generation : ids) {
    for (const NcclUniqueId& id : generation) {
      REQUIRE(id == generation[0]);
    }
  }
  REQUIRE_FALSE(ids[0][0] == ids[1][0]);
  REQUIRE_FALSE(ids[1][0] == ids[2][0]);
  REQUIRE(nccl.take_calls().size() == 3);  // only rank 0 asks
}

TEST_CASE("unique id: where rank 0 gets none, all ranks say why; where it never comes, a timeout") {
  MemoryStore store;
  FakeNccl nccl;
  nccl.fail("get_unique_id", NcclResult::kSystemError);
  const Errors errors = run_ranks(
      3, [&](int rank) { exchange_unique_id(store, nccl, rank, 3, "device 1", patient()); });
  require_all_threw<GroupError>(errors);
  REQUIRE(contains(text_of(errors[2]), "ncclGetUniqueId failed on rank 0: error text 2"));
  REQUIRE_THROWS_AS(exchange_unique_id(store, nccl, 1, 2, "device 2", soon()), TimeoutError);
}

TEST_CASE("unique id: ranks that never come are named") {
  MemoryStore store;
  FakeNccl nccl;
  const Errors errors = run_ranks(2, [&](int rank) {
    exchange_unique_id(store, nccl, rank, 5, "device 0", rank == 0 ? soon() : patient());
  });
  REQUIRE(threw<TimeoutError>(errors[0]));
  REQUIRE(contains(text_of(errors[0]), "ranks 2, 3 and 4 did not come within"));
  REQUIRE(contains(text_of(errors[1]), "ranks 2, 3 and 4 did not come within"));
}
