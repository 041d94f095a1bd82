// Every collective, with all ranks' plans carried out by the simulation.
#include "nccl/nccl_plan.h"

#include <functional>
#include <numeric>

#include "catch.h"
#include "nccl_simulation.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

using Numbers = std::vector<std::int32_t>;
using Counts = std::vector<std::size_t>;

// One number for each element of each rank's tensor for each destination.
std::int32_t value(int rank, std::size_t destination, std::size_t i) {
  return static_cast<std::int32_t>(10000 * (rank + 1) + 1000 * destination + i);
}

// The memory of one rank's tensors, each of its own or one after another.
class PlacedTensors {
 public:
  PlacedTensors(const Counts& counts, bool adjacent) {
    std::size_t total = 0;
    for (const std::size_t count : counts) {
      offsets_.push_back(total);
      total += count + (adjacent ? 0 : 3);
    }
    counts_ = counts;
    memory_.assign(total, -1);
  }
  std::int32_t* data(std::size_t i) { return memory_.data() + offsets_[i]; }
  std::size_t count(std::size_t i) const { return counts_[i]; }
  std::size_t size() const { return counts_.size(); }
  void fill(int rank) {
    for (std::size_t i = 0; i < size(); ++i) {
      for (std::size_t k = 0; k < counts_[i]; ++k) {
        data(i)[k] = value(rank, i, k);
      }
    }
  }
  Numbers numbers(std::size_t i) { return {data(i), data(i) + counts_[i]}; }
  Span span(std::size_t i) {
    return {reinterpret_cast<std::byte*>(counts_[i] == 0 ? nullptr : data(i)), counts_[i] * 4};
  }
  ConstSpan const_span(std::size_t i) {
    const Span mutable_span = span(i);
    return {mutable_span.data, mutable_span.bytes};
  }

 private:
  Numbers memory_;
  Counts offsets_;
  Counts counts_;
};

Request request_of(OpKind kind, std::size_t count, int n_ranks = 0) {
  Request request;
  request.kind = kind;
  request.dtype = DType::kInt32;
  request.element_bytes = 4;
  request.count = count;
  if (n_ranks > 0) {
    const auto n = static_cast<std::size_t>(n_ranks);
    request.inputs.resize(n);
    request.outputs.resize(pattern(kind) == Pattern::kExchange ? n : 1);
    request.send_counts.resize(n, 0);
    request.recv_counts.resize(n, 0);
  }
  return request;
}

// Plans all ranks' requests and carries them out.
void run(const std::vector<std::vector<Request>>& by_rank) {
  const int n_ranks = static_cast<int>(by_rank.size());
  std::vector<NcclPlan> plans;
  std::vector<std::vector<std::byte>> scratch;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const auto& requests = by_rank[static_cast<std::size_t>(rank)];
    scratch.emplace_back(scratch_bytes(requests, n_ranks) + 1);
    plans.push_back(plan_nccl(requests, {rank, n_ranks, Float8::kNone, scratch.back().data()}));
  }
  NcclSimulation(std::move(plans)).run();
}

void run_one(const std::vector<Request>& by_rank) {
  std::vector<std::vector<Request>> lists;
  for (const Request& request : by_rank) {
    lists.push_back({request});
  }
  run(lists);
}

std::vector<NcclFunction> functions(const NcclPlan& plan) {
  std::vector<NcclFunction> result;
  for (const NcclCall& call : plan.calls) {
    result.push_back(call.function);
  }
  return result;
}

// The counts that ranks bring: equal, uneven, some 0, all 0.
std::vector<Counts> count_cases(int n_ranks) {
  std::vector<Counts> cases;
  const auto n = static_cast<std::size_t>(n_ranks);
  cases.emplace_back(n, 0);
  cases.emplace_back(n, 1);
  cases.emplace_back(n, 7);
  Counts uneven(n);
  std::iota(uneven.begin(), uneven.end(), 0);  // rank 0 brings nothing
  cases.push_back(uneven);
  std::iota(uneven.begin(), uneven.end(), 2);
  cases.push_back(uneven);
  return cases;
}

}  // namespace

TEST_CASE("NCCL plan: all_reduce and reduce, in place and not, coalesced") {
  for (int n_ranks = 1; n_ranks <= 4; ++n_ranks) {
    for (const std::size_t count : {0, 1, 5}) {
      const auto n = static_cast<std::size_t>(n_ranks);
      std::vector<PlacedTensors> sent(n, PlacedTensors({count, count + 1, 2}, true));
      std::vector<PlacedTensors> received = sent;
      std::vector<std::vector<Request>> by_rank;
      const int root = n_ranks - 1;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        sent[r].fill(rank);
        Request apart = request_of(OpKind::kAllReduceCoalesced, count);
        apart.inputs = {sent[r].const_span(0)};
        apart.outputs = {received[r].span(0)};
        Request in_place = request_of(OpKind::kAllReduceCoalesced, count + 1);
        in_place.inputs = {sent[r].const_span(1)};
        in_place.outputs = {sent[r].span(1)};
        Request to_root = request_of(OpKind::kReduce, 2);
        to_root.root = root;
        to_root.inputs = {sent[r].const_span(2)};
        if (rank == root) {
          to_root.outputs = {received[r].span(2)};
        }
        by_rank.push_back({apart, in_place, to_root});
      }
      run(by_rank);
      const auto total = [&](std::size_t tensor, std::size_t i) {
        std::int32_t sum = 0;
        for (int rank = 0; rank < n_ranks; ++rank) {
          sum += value(rank, tensor, i);
        }
        return sum;
      };
      for (std::size_t r = 0; r < n; ++r) {
        for (std::size_t i = 0; i < count; ++i) {
          REQUIRE(received[r].data(0)[i] == total(0, i));
        }
        for (std::size_t i = 0; i < count + 1; ++i) {
          REQUIRE(sent[r].data(1)[i] == total(1, i));
        }
        const bool is_root = static_cast<int>(r) == root;
        REQUIRE(received[r].data(2)[0] == (is_root ? total(2, 0) : -1));
      }
    }
  }
}

TEST_CASE("NCCL plan: of one rank, what is in place stays, and what is not is copied") {
  alignas(16) std::byte memory[32];
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin}) {
    Request request = request_of(OpKind::kAllReduce, 4, 1);
    request.op = op;
    request.inputs = {{memory, 16}};
    request.outputs = {{memory, 16}};
    const NcclPlan in_place = plan_nccl({request}, {0, 1, Float8::kNone, nullptr});
    REQUIRE(in_place.calls.empty());
    REQUIRE(in_place.before.empty());
    request.outputs = {{memory + 16, 16}};
    const NcclPlan apart = plan_nccl({request}, {0, 1, Float8::kNone, nullptr});
    REQUIRE(apart.calls.empty());
    REQUIRE(apart.before.size() == 1);
    REQUIRE(apart.before[0].bytes == 16);
    REQUIRE(plan_nccl({request}, {0, 2, Float8::kNone, nullptr}).calls.size() == 1);
    request.op = ReduceOp::kBxor;
    REQUIRE_THROWS_AS(plan_nccl({request}, {0, 1, Float8::kNone, nullptr}), UsageError);
  }
}

TEST_CASE("NCCL plan: a factor of one rank reaches every element, whatever NCCL's kernel does") {
  // See Note [Groups of one]: how many times NCCL 2.28 writes each element of a call.
  const auto write = [](const NcclCall& call, const std::byte* begin, std::vector<int>& times) {
    const std::uint64_t element = element_bytes(call.reduction.dtype);
    const std::uint64_t blocks =
        std::min<std::uint64_t>(32, (call.count * element + 16383) / 16384);
    const std::uint64_t per_access = 16 / element;
    const std::uint64_t share =
        (call.count / blocks + per_access - 1) / per_access * per_access;  // / rounds down
    const auto first = static_cast<std::uint64_t>(static_cast<std::byte*>(call.recv) - begin);
    REQUIRE(call.send == call.recv);
    REQUIRE(first % 16 == 0);
    for (std::uint64_t i = 0; i < std::min(blocks * share, call.count); ++i) {
      ++times[first / element + i];
    }
  };
  std::vector<std::byte> memory(3 << 20);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    for (const std::size_t count :
         {1, 5, 4096, 4097, 70000, 99999, 131071, 131072, 262147, 393215}) {
      Request request = request_of(OpKind::kAllReduce, count, 1);
      request.dtype = dtype;
      request.op = ReduceOp::kPremulSum;
      request.factor = 0.3;
      request.inputs = {{memory.data(), count * element_bytes(dtype)}};
      request.outputs = {{memory.data(), count * element_bytes(dtype)}};
      const NcclPlan plan = plan_nccl({request}, {0, 1, Float8::kNone, nullptr});
      REQUIRE(plan.before.empty());
      std::vector<int> times(count);
      for (const NcclCall& call : plan.calls) {
        REQUIRE(call.reduction.has_factor);
        write(call, memory.data(), times);
      }
      INFO(name(dtype) << ' ' << count << " in " << plan.calls.size() << " calls");
      REQUIRE(times == std::vector<int>(count, 1));
      REQUIRE(plan.calls.size() <= 32);
    }
  }
}

TEST_CASE("NCCL plan: broadcast from every root") {
  for (int n_ranks = 1; n_ranks <= 4; ++n_ranks) {
    for (int root = 0; root < n_ranks; ++root) {
      for (const std::size_t count : {0, 1, 9}) {
        std::vector<PlacedTensors> tensors(static_cast<std::size_t>(n_ranks),
                                           PlacedTensors({count}, true));
        std::vector<Request> by_rank;
        for (int rank = 0; rank < n_ranks; ++rank) {
          PlacedTensors& own = tensors[static_cast<std::size_t>(rank)];
          Request request = request_of(OpKind::kBroadcast, count, n_ranks);
          request.root = root;
          if (rank == root) {
            own.fill(root);
            for (int peer = 0; peer < n_ranks; ++peer) {
              if (peer != root) {
                request.inputs[static_cast<std::size_t>(peer)] = own.const_span(0);
              }
            }
          } else {
            request.outputs[static_cast<std::size_t>(root)] = own.span(0);
          }
          by_rank.push_back(request);
        }
        run_one(by_rank);
        for (PlacedTensors& own : tensors) {
          REQUIRE(own.numbers(0) == tensors[static_cast<std::size_t>(root)].numbers(0));
        }
      }
    }
  }
}

TEST_CASE("NCCL plan: all_gather into one tensor or a list, even or not") {
  for (int n_ranks = 1; n_ranks <= 4; ++n_ranks) {
    const auto n = static_cast<std::size_t>(n_ranks);
    for (const Counts& counts : count_cases(n_ranks)) {
      // Whether a rank's list happens to be one piece of memory differs between ranks.
      std::vector<PlacedTensors> inputs;
      std::vector<PlacedTensors> outputs;
      std::vector<Request> by_rank;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        inputs.emplace_back(Counts{counts[r]}, true);
        inputs.back().fill(rank);
        outputs.emplace_back(counts, rank % 2 == 0);
        Request request = request_of(OpKind::kAllGather, counts[r], n_ranks);
        request.inputs.assign(n, inputs.back().const_span(0));
        for (std::size_t source = 0; source < n; ++source) {
          request.outputs[source] = outputs.back().span(source);
          request.send_counts[source] = counts[r];
          request.recv_counts[source] = counts[source];
        }
        by_rank.push_back(request);
      }
      run_one(by_rank);
      for (PlacedTensors& output : outputs) {
        for (std::size_t source = 0; source < n; ++source) {
          REQUIRE(output.numbers(source) == inputs[source].numbers(0));
        }
      }
    }
  }
}

TEST_CASE("NCCL plan: reduce_scatter of one tensor or a list, even or not") {
  for (int n_ranks = 1; n_ranks <= 4; ++n_ranks) {
    const auto n = static_cast<std::size_t>(n_ranks);
    for (const Counts& counts : count_cases(n_ranks)) {
      std::vector<PlacedTensors> inputs;
      std::vector<PlacedTensors> outputs;
      std::vector<Request> by_rank;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        inputs.emplace_back(counts, rank % 2 == 0);
        inputs.back().fill(rank);
        outputs.emplace_back(Counts{counts[r]}, true);
        Request request = request_of(OpKind::kReduceScatter, counts[r], n_ranks);
        for (std::size_t owner = 0; owner < n; ++owner) {
          request.inputs[owner] = inputs.back().const_span(owner);
          request.send_counts[owner] = counts[owner];
          request.recv_counts[owner] = counts[r];
        }
        request.outputs[0] = outputs.back().span(0);
        by_rank.push_back(request);
      }
      run_one(by_rank);
      for (std::size_t r = 0; r < n; ++r) {
        for (std::size_t i = 0; i < counts[r]; ++i) {
          std::int32_t sum = 0;
          for (int rank = 0; rank < n_ranks; ++rank) {
            sum += value(rank, r, i);
          }
          REQUIRE(outputs[r].data(0)[i] == sum);
        }
      }
    }
  }
}

TEST_CASE("NCCL plan: all_to_all with any splits, gather and scatter") {
  for (int n_ranks = 1; n_ranks <= 4; ++n_ranks) {
    const auto n = static_cast<std::size_t>(n_ranks);
    // count(s, d): what source s sends to destination d; for gather and scatter only some do.
    const std::vector<std::pair<OpKind, std::function<std::size_t(std::size_t, std::size_t)>>>
        cases = {
            {OpKind::kAllToAllSingle, [](std::size_t, std::size_t) { return 4; }},
            {OpKind::kAllToAll, [](std::size_t s, std::size_t d) { return (s * 3 + d) % 4; }},
            {OpKind::kAllToAll, [](std::size_t, std::size_t) { return 0; }},
            {OpKind::kGather, [&](std::size_t, std::size_t d) { return d == n - 1 ? 5 : 0; }},
            {OpKind::kGather, [&](std::size_t s, std::size_t d) { return d == 0 ? s : 0; }},
            {OpKind::kScatter, [&](std::size_t s, std::size_t) { return s == n - 1 ? 5 : 0; }},
    };
    for (const auto& [kind, count] : cases) {
      std::vector<PlacedTensors> inputs;
      std::vector<PlacedTensors> outputs;
      std::vector<Request> by_rank;
      for (std::size_t r = 0; r < n; ++r) {
        Counts sends;
        Counts receives;
        for (std::size_t peer = 0; peer < n; ++peer) {
          sends.push_back(count(r, peer));
          receives.push_back(count(peer, r));
        }
        inputs.emplace_back(sends, true);
        inputs.back().fill(static_cast<int>(r));
        outputs.emplace_back(receives, false);
        Request request = request_of(kind, sends[0], n_ranks);
        for (std::size_t peer = 0; peer < n; ++peer) {
          request.inputs[peer] = inputs.back().const_span(peer);
          request.outputs[peer] = outputs.back().span(peer);
          request.send_counts[peer] = sends[peer];
          request.recv_counts[peer] = receives[peer];
        }
        by_rank.push_back(request);
      }
      run_one(by_rank);
      for (std::size_t d = 0; d < n; ++d) {
        for (std::size_t s = 0; s < n; ++s) {
          REQUIRE(outputs[d].numbers(s) == inputs[s].numbers(d));
        }
      }
    }
  }
}

TEST_CASE("NCCL plan: the calls do not depend on where tensors lie") {
  const auto calls = [](bool adjacent, const Counts& counts) {
    PlacedTensors input({counts[0]}, true);
    PlacedTensors outputs(counts, adjacent);
    Request request = request_of(OpKind::kAllGather, counts[0], 2);
    request.inputs.assign(2, input.const_span(0));
    for (std::size_t i = 0; i < 2; ++i) {
      request.outputs[i] = outputs.span(i);
      request.recv_counts[i] = counts[i];
    }
    std::vector<std::byte> scratch(4096);
    const NcclPlan plan = plan_nccl({request}, {0, 2, Float8::kNone, scratch.data()});
    REQUIRE(plan.after.size() == (adjacent || counts[0] != counts[1] ? 0 : 2));
    return functions(plan);
  };
  using Functions = std::vector<NcclFunction>;
  REQUIRE(calls(true, {3, 3}) == Functions{NcclFunction::kAllGather});
  REQUIRE(calls(false, {3, 3}) == Functions{NcclFunction::kAllGather});
  REQUIRE(calls(true, {3, 4}) == Functions(2, NcclFunction::kBroadcast));
  REQUIRE(calls(false, {3, 4}) == Functions(2, NcclFunction::kBroadcast));
}

TEST_CASE("NCCL plan: barrier is an all-reduce of one element, alone it is nothing") {
  std::vector<std::byte> scratch(256);
  const Request barrier = request_of(OpKind::kBarrier, 0);
  REQUIRE(scratch_bytes({barrier}, 2) > 0);
  const NcclPlan plan = plan_nccl({barrier}, {0, 2, Float8::kNone, scratch.data()});
  REQUIRE(plan.calls.size() == 1);
  REQUIRE(plan.calls[0].function == NcclFunction::kAllReduce);
  REQUIRE(plan.calls[0].count == 1);
  REQUIRE(plan.calls[0].recv == scratch.data());
  REQUIRE(scratch_bytes({barrier}, 1) == 0);
  REQUIRE(plan_nccl({barrier}, {0, 1, Float8::kNone, nullptr}).calls.empty());
  REQUIRE_THROWS_AS(plan_nccl({barrier}, {0, 2, Float8::kNone, nullptr}), Error);
}

TEST_CASE("NCCL plan: messages are bytes, with counts of 64 bits") {
  std::byte byte{};
  const NcclCall send = plan_send({&byte, std::size_t{5} << 32}, 3);
  REQUIRE(send.count == std::uint64_t{5} << 32);
  REQUIRE(send.peer == 3);
  REQUIRE(send.send == &byte);
  REQUIRE(send.reduction.dtype == NcclDataType::kUint8);
  const NcclCall recv = plan_recv({&byte, 1}, 2);
  REQUIRE(recv.function == NcclFunction::kRecv);
  REQUIRE(recv.recv == &byte);

  Request large = request_of(OpKind::kAllReduce, std::uint64_t{3} << 32);
  large.dtype = DType::kComplex64;
  large.inputs = {{&byte, 8 * large.count}};
  large.outputs = {{&byte, 8 * large.count}};
  REQUIRE(plan_nccl({large}, {0, 2, Float8::kNone, nullptr}).calls[0].count == std::uint64_t{6}
                                                                                   << 32);
}

TEST_CASE("NCCL plan: what does not fit together is refused before any call") {
  std::byte byte{};
  Request refused = request_of(OpKind::kAllReduce, 1);
  refused.inputs = {{&byte, 4}};
  refused.outputs = {{&byte, 4}};
  REQUIRE_NOTHROW(plan_nccl({refused}, {}));
  refused.refusal = "the tensor is a joke";
  const auto error = error_of([&] { plan_nccl({refused}, {}); });
  REQUIRE(threw<UsageError>(error));
  REQUIRE(contains(text_of(error), "all_reduce: the tensor is a joke"));
  Request uneven = request_of(OpKind::kAllGather, 3, 2);
  uneven.recv_counts = {4, 4};
  REQUIRE_THROWS_AS(plan_nccl({uneven}, {0, 2, Float8::kNone, &byte}), UsageError);
  uneven = request_of(OpKind::kReduceScatter, 3, 2);
  uneven.send_counts = {4, 4};
  REQUIRE_THROWS_AS(plan_nccl({uneven}, {0, 2, Float8::kNone, &byte}), UsageError);
  for (const int n_ranks : {1, 2}) {
    Request unlike = request_of(OpKind::kAllToAll, 3, n_ranks);
    for (std::size_t rank = 0; rank < unlike.inputs.size(); ++rank) {
      unlike.inputs[rank] = {&byte, 12};
      unlike.outputs[rank] = {&byte, 8};
    }
    const auto refusal =
        error_of([&] { plan_nccl({unlike}, {0, n_ranks, Float8::kNone, nullptr}); });
    REQUIRE(threw<UsageError>(refusal));
    REQUIRE(contains(text_of(refusal), "all_to_all: rank 0 sends itself 12 bytes, and receives 8"));
  }
  for (const OpKind kind : {OpKind::kNewWindow, OpKind::kNewEmptyWindow, OpKind::kWindowRegister}) {
    REQUIRE_THROWS_AS(plan_nccl({request_of(kind, 1, 2)}, {0, 2, Float8::kNone, &byte}),
                      UsageError);
  }
}
