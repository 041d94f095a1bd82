#include "nccl/nccl_transport.h"

#include <future>

#include "catch.h"
#include "fake_nccl.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

using Calls = std::vector<std::string>;

StreamHandle stream(std::uintptr_t number) { return reinterpret_cast<StreamHandle>(number); }

// A transport over the fake, which also records the copies around NCCL's calls.
struct NcclEndpoint {
  explicit NcclEndpoint(int polls = 0)
      : transport(
            nccl, connect(nccl, polls), [this](const std::vector<ByteCopy>& list, StreamHandle on) {
              copies.push_back(concat(list.size(), " copies after ", nccl.take_calls().size(),
                                      " calls, stream=", reinterpret_cast<std::uintptr_t>(on)));
            }) {
    nccl.take_calls();
  }

  static std::unique_ptr<Communicator> connect(FakeNccl& nccl, int polls) {
    nccl.stay_in_progress(polls);
    return Communicator::connect(nccl, {}, 0, 2, {}, patient());
  }

  FakeNccl nccl;
  std::vector<std::string> copies;
  NcclTransport transport;
};

NcclCall all_reduce_call(void* data, std::uint64_t count) {
  NcclCall call;
  call.send = data;
  call.recv = data;
  call.count = count;
  return call;
}

std::byte nccl_memory[64];

}  // namespace

TEST_CASE("NCCL transport: one call goes without a group, on its stream, and is polled") {
  NcclEndpoint endpoint(4);
  const int polls_before = endpoint.nccl.polls();
  endpoint.transport.issue({{}, {all_reduce_call(nccl_memory, 16)}, {}}, stream(7), "all_reduce #1",
                           patient());
  REQUIRE(endpoint.nccl.take_calls() ==
          Calls{"all_reduce count=16 dtype=7 op=0 in place stream=7"});
  REQUIRE(endpoint.nccl.polls() - polls_before == 5);
  REQUIRE(endpoint.copies.empty());
  // The second issue would be a violation if the first had returned while NCCL was in progress.
  endpoint.transport.issue({{}, {all_reduce_call(nccl_memory, 16)}, {}}, stream(7), "all_reduce #2",
                           patient());
  REQUIRE(endpoint.nccl.violations().empty());
}

TEST_CASE("NCCL transport: several calls are one group, between the copies") {
  NcclEndpoint endpoint(2);
  NcclPlan plan;
  plan.before = {{1, 2, 3}};
  plan.calls = {plan_send({nccl_memory, 8}, 1), plan_recv({nccl_memory + 8, 8}, 1)};
  plan.after = {{1, 2, 3}, {4, 5, 6}};
  endpoint.transport.issue(plan, stream(3), "exchange", patient());
  REQUIRE(endpoint.copies ==
          Calls{"1 copies after 0 calls, stream=3", "2 copies after 4 calls, stream=3"});
  endpoint.transport.issue({{}, plan.calls, {}}, stream(4), "exchange", patient());
  REQUIRE(endpoint.nccl.take_calls() == Calls{"group_start", "send count=8 dtype=1 peer=1 stream=4",
                                              "recv count=8 dtype=1 peer=1 stream=4", "group_end"});
  REQUIRE(endpoint.nccl.group_depth() == 0);
}

TEST_CASE("NCCL transport: a plan without calls touches nothing") {
  NcclEndpoint endpoint;
  endpoint.transport.issue({}, stream(1), "all_reduce of nothing", patient());
  REQUIRE(endpoint.nccl.take_calls().empty());
}

TEST_CASE("NCCL transport: PREMUL_SUM makes an op for each factor, and destroys it afterwards") {
  NcclEndpoint endpoint(1);
  NcclCall call = all_reduce_call(nccl_memory, 4);
  call.reduction.has_factor = true;
  call.reduction.factor = 0.5;
  NcclCall other = call;
  other.reduction.factor = 0.25;
  endpoint.transport.issue({{}, {call, other, call}, {}}, stream(1), "all_reduce", patient());
  REQUIRE(endpoint.nccl.take_calls() ==
          Calls{"create_premul_sum 0.5 dtype=7 -> 101", "create_premul_sum 0.25 dtype=7 -> 102",
                "group_start", "all_reduce count=4 dtype=7 op=101 in place stream=1",
                "all_reduce count=4 dtype=7 op=102 in place stream=1",
                "all_reduce count=4 dtype=7 op=101 in place stream=1", "group_end",
                "destroy_op 101", "destroy_op 102"});
  REQUIRE(endpoint.nccl.violations().empty());
}

TEST_CASE("NCCL transport: an op made for a call goes with a communicator that is aborted in it") {
  NcclEndpoint endpoint;
  NcclCall call = all_reduce_call(nccl_memory, 4);
  call.reduction.has_factor = true;
  call.reduction.factor = 0.5;
  endpoint.nccl.block("all_reduce");  // it connects ranks, one of which never comes
  endpoint.nccl.fail("all_reduce", NcclResult::kInternalError);
  auto caller = std::async(std::launch::async, [&] {
    endpoint.transport.issue({{}, {call}, {}}, stream(1), "all_reduce", patient());
  });
  endpoint.nccl.await_blocked_caller();
  endpoint.transport.abort("rank 1 died");
  endpoint.nccl.unblock();
  REQUIRE_THROWS_AS(caller.get(), GroupError);
  REQUIRE(endpoint.nccl.take_calls().back() == "comm_abort #0");  // and no destroy_op
}

TEST_CASE("NCCL transport: a call that fails in a group ends the group, and names itself") {
  NcclEndpoint endpoint;
  endpoint.nccl.fail("all_reduce", NcclResult::kInvalidArgument);
  const NcclPlan plan{{}, {all_reduce_call(nccl_memory, 1), all_reduce_call(nccl_memory, 2)}, {}};
  auto error =
      error_of([&] { endpoint.transport.issue(plan, stream(1), "all_reduce #5", patient()); });
  REQUIRE(threw<UsageError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #5: ncclAllReduce failed on rank 0 of 2"));
  REQUIRE(endpoint.nccl.group_depth() == 0);
  REQUIRE_NOTHROW(endpoint.transport.issue(plan, stream(1), "all_reduce #6", patient()));

  endpoint.nccl.fail("group_end", NcclResult::kRemoteError);
  error = error_of([&] { endpoint.transport.issue(plan, stream(1), "all_reduce #7", patient()); });
  REQUIRE(threw<PeerLostError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #7: ncclGroupEnd failed on rank 0 of 2"));
  error = error_of([&] { endpoint.transport.issue(plan, stream(1), "all_reduce #8", patient()); });
  REQUIRE(contains(text_of(error), "can not be used any more: all_reduce #7"));
}

TEST_CASE("NCCL transport: an error that comes while NCCL is in progress is the operation's") {
  NcclEndpoint endpoint;
  endpoint.nccl.set_async_error(NcclResult::kSystemError);
  const auto error = error_of([&] {
    endpoint.transport.issue({{}, {all_reduce_call(nccl_memory, 1)}, {}}, stream(1),
                             "all_reduce #9", patient());
  });
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #9"));
  REQUIRE(endpoint.transport.check_async_error());
}

TEST_CASE("NCCL transport: ranks that never come are a timeout, and abort ends it") {
  NcclEndpoint endpoint;
  endpoint.nccl.stay_in_progress(kForEver);
  const NcclPlan plan{{}, {all_reduce_call(nccl_memory, 1)}, {}};
  const auto error = error_of(
      [&] { endpoint.transport.issue(plan, stream(1), "all_reduce #3 'layer1.weight'", soon()); });
  REQUIRE(threw<TimeoutError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #3 'layer1.weight': rank 0 of 2 waited 150 ms"));
  REQUIRE_THROWS_AS(endpoint.transport.issue(plan, stream(1), "all_reduce #4", soon()), GroupError);
  endpoint.nccl.take_calls();
  endpoint.transport.abort("timeout");
  REQUIRE(endpoint.nccl.take_calls() == Calls{"comm_abort #0"});
  REQUIRE(endpoint.nccl.violations().empty());
}

TEST_CASE("NCCL transport: closing waits, then frees") {
  NcclEndpoint endpoint(3);
  endpoint.transport.close(patient());
  REQUIRE(endpoint.nccl.take_calls() == Calls{"comm_finalize", "comm_destroy"});
  REQUIRE_THROWS_AS(endpoint.transport.issue({{}, {all_reduce_call(nccl_memory, 1)}, {}}, stream(1),
                                             "all_reduce", patient()),
                    GroupError);
}
