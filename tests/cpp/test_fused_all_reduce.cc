// Coalesced all-reduces of several ranks, packed, reduced by the simulation, and unpacked.
#include "nccl/fused_all_reduce.h"

#include "catch.h"
#include "core/error.h"
#include "free_cost.h"
#include "nccl_simulation.h"
#include "pack_on_host.h"

using namespace horon;
using namespace horon::testing;

namespace {

Request all_reduce(void* data, std::uint64_t count, DType dtype, ReduceOp op = ReduceOp::kSum) {
  Request request;
  request.kind = OpKind::kAllReduceCoalesced;
  request.dtype = dtype;
  request.type_code = static_cast<std::uint8_t>(dtype);
  request.op = op;
  request.element_bytes = element_bytes(dtype);
  request.count = count;
  auto* bytes = static_cast<std::byte*>(data);
  request.inputs = {{bytes, count * request.element_bytes}};
  request.outputs = {{bytes, count * request.element_bytes}};
  return request;
}

struct alignas(256) Buffer {
  std::byte bytes[1 << 16];
};

FusedPlace place_of(Buffer& buffer, int n_ranks) {
  FusedPlace place;
  place.n_ranks = n_ranks;
  place.buffer = buffer.bytes;
  return place;
}

}  // namespace

TEST_CASE("fused all_reduce: every tensor of every rank gets the sum") {
  constexpr int kRanks = 3;
  constexpr std::size_t kTensors = 60;
  std::vector<std::vector<std::vector<std::int32_t>>> tensors(kRanks);
  std::vector<Buffer> buffers(kRanks);
  std::vector<std::vector<Request>> requests(kRanks);
  const auto value = [](std::size_t rank, std::size_t tensor, std::size_t i) {
    return static_cast<std::int32_t>(rank * 100000 + tensor * 1000 + i);
  };
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
      std::vector<std::int32_t> values(tensor * 7 % 100 + 1);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = value(rank, tensor, i);
      }
      tensors[rank].push_back(std::move(values));
    }
    for (auto& values : tensors[rank]) {
      requests[rank].push_back(all_reduce(values.data(), values.size(), DType::kInt32));
    }
  }
  std::vector<FusedAllReduce> fused;
  std::vector<NcclPlan> plans;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    const FusionDecision decision = decide_fusion(fusion_tensors(requests[rank]), free_cost());
    REQUIRE(decision.batches.size() == 1);
    REQUIRE(decision.direct.empty());
    fused.push_back(plan_fused_all_reduce(requests[rank], decision.batches[0],
                                          place_of(buffers[rank], kRanks)));
    run_on_host(fused.back().pack);
    plans.push_back({{}, {fused.back().call}, {}});
  }
  NcclSimulation(std::move(plans)).run();
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    run_on_host(fused[rank].unpack);
    for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
      for (std::size_t i = 0; i < tensors[rank][tensor].size(); ++i) {
        REQUIRE(tensors[rank][tensor][i] ==
                value(0, tensor, i) + value(1, tensor, i) + value(2, tensor, i));
      }
    }
  }
}

TEST_CASE("fused all_reduce: floats are averaged and scaled outside NCCL, the rest by it") {
  struct Case {
    DType dtype;
    ReduceOp op;
    NcclReduceOp nccl_op;
    double before, after;
  };
  const Case cases[] = {
      {DType::kBFloat16, ReduceOp::kAvg, NcclReduceOp::kSum, 1.0, 1.0 / 3},
      {DType::kFloat16, ReduceOp::kAvg, NcclReduceOp::kSum, 1.0 / 3, 1.0},
      {DType::kFloat64, ReduceOp::kAvg, NcclReduceOp::kSum, 1.0, 1.0 / 3},
      {DType::kFloat16, ReduceOp::kPremulSum, NcclReduceOp::kSum, 0.5, 1.0},
      {DType::kFloat32, ReduceOp::kMax, NcclReduceOp::kMax, 1.0, 1.0},
      {DType::kInt32, ReduceOp::kAvg, NcclReduceOp::kAvg, 1.0, 1.0},
      {DType::kComplex64, ReduceOp::kAvg, NcclReduceOp::kAvg, 1.0, 1.0},
      {DType::kBool, ReduceOp::kSum, NcclReduceOp::kMax, 1.0, 1.0},
  };
  Buffer buffer;
  Buffer data{};
  for (const Case& each : cases) {
    INFO(name(each.dtype) << ' ' << name(each.op));
    std::vector<Request> requests(2, all_reduce(data.bytes, 5, each.dtype, each.op));
    for (Request& request : requests) {
      request.factor = 0.5;
    }
    const FusionDecision decision = decide_fusion(fusion_tensors(requests), free_cost());
    REQUIRE(decision.batches.size() == 1);
    const FusedAllReduce fused =
        plan_fused_all_reduce(requests, decision.batches[0], place_of(buffer, 3));
    REQUIRE(fused.call.reduction.op == each.nccl_op);
    REQUIRE_FALSE(fused.call.reduction.has_factor);
    REQUIRE(fused.pack.at(0).header.factor == each.before);
    REQUIRE(fused.unpack.at(0).header.factor == each.after);
    // All bytes up to the end of the last tensor.
    REQUIRE(fused.call.count * element_bytes(fused.call.reduction.dtype) ==
            decision.batches[0].offsets[1] + 5 * element_bytes(each.dtype));
  }
}

TEST_CASE("fused all_reduce: an integer's factor stays with NCCL") {
  Buffer buffer;
  Buffer data{};
  std::vector<Request> requests(2, all_reduce(data.bytes, 5, DType::kInt32, ReduceOp::kPremulSum));
  requests[0].factor = requests[1].factor = 3;
  const auto batches = decide_fusion(fusion_tensors(requests), free_cost()).batches;
  const FusedAllReduce fused = plan_fused_all_reduce(requests, batches.at(0), place_of(buffer, 2));
  REQUIRE(fused.call.reduction.has_factor);
  REQUIRE(fused.call.reduction.factor == 3);
  REQUIRE(fused.pack.at(0).header.factor == 1.0);
}

TEST_CASE("fused all_reduce: tensors of different types, ops and factors are different kinds") {
  Buffer data{};
  std::vector<Request> requests = {all_reduce(data.bytes, 1, DType::kFloat32),
                                   all_reduce(data.bytes, 2, DType::kFloat32),
                                   all_reduce(data.bytes, 1, DType::kInt32),
                                   all_reduce(data.bytes, 1, DType::kFloat32, ReduceOp::kAvg),
                                   all_reduce(data.bytes, 1, DType::kFloat32)};
  requests[4].factor = 2;
  std::vector<std::uint32_t> kinds;
  for (const FusionTensor& tensor : fusion_tensors(requests)) {
    kinds.push_back(tensor.kind);
  }
  REQUIRE(kinds == std::vector<std::uint32_t>{0, 0, 1, 2, 3});
  REQUIRE(fusion_tensors(requests)[1].bytes == 8);
}

TEST_CASE("fused all_reduce: what NCCL can not reduce is refused") {
  Buffer buffer;
  Buffer data{};
  const std::vector<Request> requests(2, all_reduce(data.bytes, 5, DType::kInt16));
  const auto batches = decide_fusion(fusion_tensors(requests), free_cost()).batches;
  REQUIRE_THROWS_AS(plan_fused_all_reduce(requests, batches.at(0), place_of(buffer, 2)),
                    UsageError);
}
