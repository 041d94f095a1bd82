// What a batch of named operations becomes on a stream: tables of plans, without carrying them out.
// (test_named_gpu.cc carries them out.)
#include "nccl/named_batch_plan.h"

#include <cstdlib>
#include <memory>

#include "catch.h"
#include "core/error.h"
#include "free_cost.h"
#include "named/fusion.h"
#include "pack_on_host.h"

using namespace horon;
using namespace horon::testing;

namespace {

struct Tensors final : NamedOperation {
  Span allocate(std::size_t index, std::int64_t rows) override {
    allocated.resize(tensors.size());
    const std::size_t bytes = static_cast<std::size_t>(rows) * request->tensors[index].bytes();
    allocated[index].resize(bytes);
    return {allocated[index].data(), bytes};
  }
  std::vector<std::vector<std::byte>> allocated;
};

alignas(256) std::byte memory[1 << 20];

struct Wanted {
  NamedKind kind = NamedKind::kAllReduce;
  DType dtype = DType::kFloat32;
  NamedOp op = NamedOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
};

// One operation with tensors of these lengths, in place, at these distances from `memory`.
std::shared_ptr<Tensors> operation(const Wanted& wanted, const std::vector<std::int64_t>& lengths,
                                   const std::vector<std::size_t>& offsets) {
  auto request = std::make_shared<NamedRequest>();
  request->kind = wanted.kind;
  request->op = wanted.op;
  request->device = DeviceKind::kCuda;
  request->prescale = wanted.prescale;
  request->postscale = wanted.postscale;
  auto made = std::make_shared<Tensors>();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    TensorSpec spec;
    spec.name = std::to_string(i);
    spec.dtype = wanted.dtype;
    spec.element_bytes = static_cast<std::uint8_t>(element_bytes(wanted.dtype));
    spec.shape = {lengths[i]};
    request->tensors.push_back(spec);
    const Span span{memory + offsets[i], spec.bytes()};
    made->tensors.push_back({{span.data, span.bytes}, span});
  }
  made->request = request;
  made->rows.resize(lengths.size(), 0);
  return made;
}

std::vector<BatchTensor> batch_of(const std::shared_ptr<Tensors>& operation, bool joined = false) {
  std::vector<BatchTensor> batch;
  for (std::size_t i = 0; i < operation->request->tensors.size(); ++i) {
    batch.push_back({operation->request, i, joined ? nullptr : operation});
  }
  return batch;
}

struct Planned {
  NamedBatchPlan plan;
  std::vector<Span> scratch;
};

Planned plan(const std::vector<BatchTensor>& batch, int n_ranks, const FusionCost& cost,
             std::vector<std::int64_t> numbers = {}, int rank = 0, int root = 0) {
  static std::byte* const scratch_memory =
      static_cast<std::byte*>(std::aligned_alloc(256, 1 << 22));
  Planned planned;
  NamedBatchPlace place;
  place.rank = rank;
  place.n_ranks = n_ranks;
  place.cost = cost;
  std::size_t used = 0;
  planned.plan = plan_named_batch({batch, root, std::move(numbers)}, place, [&](std::size_t bytes) {
    std::byte* const data = scratch_memory + used;
    used += (bytes + 255) / 256 * 256;
    planned.scratch.push_back({data, bytes});
    return data;
  });
  return planned;
}

double factor_of(const std::vector<PackLaunch>& launches) {
  return launches.empty() ? 1.0 : launches.front().header.factor;
}

}  // namespace

TEST_CASE(
    "named batch plan: an all-reduce alone goes in place, scaled by NCCL where that is exact") {
  struct Case {
    DType dtype;
    NamedOp op;
    double prescale, postscale;
    int n_ranks;
    NcclReduceOp nccl_op;
    double before, after;
  };
  const Case cases[] = {
      {DType::kFloat32, NamedOp::kSum, 1, 1, 3, NcclReduceOp::kSum, 1, 1},
      {DType::kFloat32, NamedOp::kAverage, 1, 1, 3, NcclReduceOp::kAvg, 1, 1},
      {DType::kBFloat16, NamedOp::kAverage, 1, 1, 4, NcclReduceOp::kAvg, 1, 1},
      {DType::kBFloat16, NamedOp::kAverage, 1, 1, 3, NcclReduceOp::kSum, 1, 1.0 / 3},
      {DType::kFloat16, NamedOp::kAverage, 1, 1, 3, NcclReduceOp::kSum, 1.0 / 3, 1},
      {DType::kFloat16, NamedOp::kAverage, 6, 5, 3, NcclReduceOp::kSum, 2, 5},
      {DType::kFloat64, NamedOp::kAverage, 0.5, 2, 3, NcclReduceOp::kAvg, 0.5, 2},
      {DType::kComplex64, NamedOp::kSum, 0.5, 1, 2, NcclReduceOp::kSum, 0.5, 1},
      {DType::kFloat32, NamedOp::kMin, 0.5, 3, 2, NcclReduceOp::kMin, 0.5, 3},
      {DType::kInt32, NamedOp::kProduct, 1, 1, 2, NcclReduceOp::kProduct, 1, 1},
      {DType::kInt64, NamedOp::kAverage, 1, 1, 2, NcclReduceOp::kAvg, 1, 1},
      {DType::kBool, NamedOp::kSum, 1, 1, 2, NcclReduceOp::kMax, 1, 1},
  };
  for (const Case& each : cases) {
    INFO(name(each.dtype) << ' ' << name(each.op) << ' ' << each.prescale << ' ' << each.n_ranks);
    const auto tensors = operation(
        {NamedKind::kAllReduce, each.dtype, each.op, each.prescale, each.postscale}, {10}, {0});
    const Planned planned = plan(batch_of(tensors), each.n_ranks, {});
    REQUIRE(planned.scratch.empty());
    REQUIRE(planned.plan.zeros.empty());
    REQUIRE(planned.plan.calls.size() == 1);
    const NcclCall& call = planned.plan.calls[0];
    REQUIRE(call.function == NcclFunction::kAllReduce);
    REQUIRE(call.reduction.op == each.nccl_op);
    REQUIRE(call.recv == memory);
    REQUIRE(call.send == memory);
    REQUIRE(call.count * element_bytes(call.reduction.dtype) == 10 * element_bytes(each.dtype));
    REQUIRE(factor_of(planned.plan.before) == Approx(each.before));
    REQUIRE(factor_of(planned.plan.after) == Approx(each.after));
  }
}

TEST_CASE("named batch plan: of one rank, values are copied or scaled at once, without NCCL") {
  const auto tensors =
      operation({NamedKind::kAllReduce, DType::kFloat16, NamedOp::kAverage, 0.5, 3}, {10, 70000, 0},
                {0, 32, 0});
  for (const FusionCost& cost : {FusionCost{}, free_cost()}) {
    const Planned scaled = plan(batch_of(tensors), 1, cost);
    REQUIRE(scaled.scratch.empty());
    REQUIRE(scaled.plan.calls.empty());
    REQUIRE(scaled.plan.after.empty());
    REQUIRE(scaled.plan.before.size() == 1);
    REQUIRE(factor_of(scaled.plan.before) == 1.5);
    REQUIRE(scaled.plan.before[0].entries.size() == 2);
  }
  const auto plain = operation({}, {10, 20}, {0, 40});
  REQUIRE(plan(batch_of(plain), 1, {}).plan.before.empty());
  plain->tensors[1].output.data = memory + 4096;
  const Planned moved = plan(batch_of(plain), 1, {});
  REQUIRE(moved.plan.calls.empty());
  REQUIRE(moved.plan.before.size() == 1);
  REQUIRE(moved.plan.before[0].entries.size() == 1);
  REQUIRE(parts_of(moved.plan.before[0])[0].destination ==
          reinterpret_cast<std::uint64_t>(memory + 4096));
}

TEST_CASE("named batch plan: a result elsewhere needs no copy of its own") {
  auto tensors = operation({}, {10}, {0});
  tensors->tensors[0].output.data = memory + 512;
  const Planned plain = plan(batch_of(tensors), 2, {});
  REQUIRE(plain.plan.before.empty());
  REQUIRE(plain.plan.calls.at(0).send == memory);
  REQUIRE(plain.plan.calls.at(0).recv == memory + 512);

  tensors = operation({NamedKind::kAllReduce, DType::kFloat32, NamedOp::kSum, 0.5}, {10}, {0});
  tensors->tensors[0].output.data = memory + 512;
  const Planned scaled = plan(batch_of(tensors), 2, {});
  REQUIRE(scaled.plan.before.size() == 1);
  REQUIRE(scaled.plan.calls.at(0).send == memory + 512);
}

TEST_CASE("named batch plan: tensors that lie as in the buffer are not packed") {
  struct Case {
    const char* what;
    std::vector<std::int64_t> lengths;
    std::vector<std::size_t> offsets;
    bool is_packed;
  };
  const Case cases[] = {
      {"side by side", {16, 32, 5}, {0, 64, 192}, false},
      {"in another order", {16, 16, 5}, {64, 0, 128}, true},
      {"with a gap that is the buffer's own", {15, 32, 5}, {0, 64, 192}, true},
      {"further apart", {16, 32, 5}, {0, 128, 256}, true},
  };
  for (const Case& each : cases) {
    INFO(each.what);
    const auto tensors = operation({}, each.lengths, each.offsets);
    const Planned planned = plan(batch_of(tensors), 2, free_cost());
    REQUIRE(planned.plan.calls.size() == 1);
    REQUIRE(planned.plan.before.empty() == !each.is_packed);
    REQUIRE(planned.plan.after.empty() == !each.is_packed);
    REQUIRE(planned.scratch.size() == (each.is_packed ? 1 : 0));
    const std::byte* const where = each.is_packed ? planned.scratch[0].data : memory;
    REQUIRE(planned.plan.calls[0].recv == where);
    // A rank whose tensors lie elsewhere, or that has joined, makes the same call.
    const Planned joined = plan(batch_of(tensors, true), 2, free_cost());
    REQUIRE(joined.plan.calls.size() == 1);
    REQUIRE(joined.plan.calls[0].count == planned.plan.calls[0].count);
    REQUIRE(joined.plan.zeros.size() == each.lengths.size());
    REQUIRE(joined.plan.before.empty());
    REQUIRE(joined.plan.after.empty());
  }
}

TEST_CASE("named batch plan: in place in the buffer, factors are applied where tensors lie") {
  const auto tensors =
      operation({NamedKind::kAllReduce, DType::kBFloat16, NamedOp::kAverage}, {8, 8}, {0, 16});
  const Planned planned = plan(batch_of(tensors), 3, free_cost());
  REQUIRE(planned.scratch.empty());
  REQUIRE(planned.plan.before.empty());
  REQUIRE(planned.plan.after.size() == 1);
  for (const PackPart& part : parts_of(planned.plan.after[0])) {
    REQUIRE(part.source == part.destination);
  }
}

TEST_CASE(
    "named batch plan: a few small tensors go in one group of calls, many through the buffer") {
  FusionCost cost;
  cost.seconds_per_launch = cost.seconds_per_call;
  for (const std::size_t n : {std::size_t{2}, std::size_t{40}}) {
    std::vector<std::size_t> offsets;
    for (std::size_t i = 0; i < n; ++i) {
      offsets.push_back(i * 1024);
    }
    const auto tensors = operation({}, std::vector<std::int64_t>(n, 100), offsets);
    const Planned planned = plan(batch_of(tensors), 2, cost);
    REQUIRE(planned.plan.calls.size() == (n == 2 ? 2 : 1));
    REQUIRE(planned.plan.before.empty() == (n == 2));
  }
}

TEST_CASE("named batch plan: nothing to do makes no call") {
  REQUIRE(plan(batch_of(operation({}, {0}, {0})), 2, {}).plan.calls.empty());
  const Wanted moved{NamedKind::kBroadcast};
  REQUIRE(plan(batch_of(operation(moved, {0}, {0})), 2, {}).plan.calls.empty());
  Wanted gather{NamedKind::kAllGather};
  REQUIRE(plan(batch_of(operation(gather, {-1}, {0})), 2, {}, {0, 0}).plan.calls.empty());
  Wanted exchange{NamedKind::kAllToAll};
  REQUIRE(plan(batch_of(operation(exchange, {-1}, {0})), 2, {}, {0, 0, 0, 0}).plan.calls.empty());
}

TEST_CASE("named batch plan: what a GPU reduces, and what goes by way of the host") {
  struct Case {
    DType dtype;
    NamedOp op;
    double prescale;
    bool is_on_device;
  };
  const Case cases[] = {
      {DType::kFloat32, NamedOp::kSum, 0.5, true},   {DType::kBFloat16, NamedOp::kAverage, 1, true},
      {DType::kFloat16, NamedOp::kProduct, 2, true}, {DType::kFloat32, NamedOp::kAdasum, 1, false},
      {DType::kInt32, NamedOp::kAverage, 1, true},   {DType::kInt32, NamedOp::kSum, 0.5, false},
      {DType::kInt8, NamedOp::kSum, 1, true},        {DType::kInt8, NamedOp::kAverage, 1, false},
      {DType::kInt16, NamedOp::kSum, 1, false},      {DType::kBool, NamedOp::kMax, 1, true},
      {DType::kComplex64, NamedOp::kSum, 0.5, true}, {DType::kOpaque, NamedOp::kSum, 1, false},
  };
  for (const Case& each : cases) {
    INFO(name(each.dtype) << ' ' << name(each.op) << ' ' << each.prescale);
    REQUIRE(is_reduced_on_device(each.dtype, each.op, each.prescale, 1.0) == each.is_on_device);
  }
}

TEST_CASE("named batch plan: tensors on GPUs may be larger before they travel alone") {
  const auto on_cpu = operation({}, {200 * 1024, 200 * 1024}, {0, 0});
  auto request = std::make_shared<NamedRequest>(*on_cpu->request);
  request->device = DeviceKind::kCpu;
  const std::vector<FusionItem> cpu = {{request.get(), 0}, {request.get(), 1}};
  const std::vector<FusionItem> gpu = {{on_cpu->request.get(), 0}, {on_cpu->request.get(), 1}};
  REQUIRE(plan_fusion(cpu, {}).size() == 2);
  REQUIRE(plan_fusion(gpu, {}).size() == 1);
  // What travels together goes through the buffer.
  REQUIRE(FusionOptions{}.gpu_alone_bytes <= largest_fused_bytes({}));
  REQUIRE(2 * FusionOptions{}.gpu_alone_bytes > largest_fused_bytes({}));
}
