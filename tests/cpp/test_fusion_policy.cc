#include "cuda/fusion_policy.h"

#include <random>

#include "catch.h"

using namespace horon;

namespace {

// Round figures: a call costs as much as moving 1000 bytes four times, a launch two calls.
FusionCost round_cost() {
  FusionCost cost;
  cost.seconds_per_call = 4e-6;
  cost.seconds_per_launch = 8e-6;
  cost.bytes_per_second = 1e9;
  cost.buffer_bytes = 4000;
  return cost;
}

std::vector<FusionTensor> tensors_of(const std::vector<std::uint64_t>& bytes) {
  std::vector<FusionTensor> tensors;
  for (const std::uint64_t each : bytes) {
    tensors.push_back({each, 0});
  }
  return tensors;
}

using Indices = std::vector<std::size_t>;

}  // namespace

TEST_CASE("fusion policy: what goes through the buffer, by the cost model") {
  struct Case {
    const char* what;
    std::vector<std::uint64_t> bytes;
    std::vector<Indices> batches;
    Indices direct;
  };
  const Case cases[] = {
      {"nothing", {}, {}, {}},
      {"one tensor", {16}, {}, {0}},
      {"five small ones: four calls saved, two launches cost as much",
       {16, 16, 16, 16, 16},
       {},
       {0, 1, 2, 3, 4}},
      {"six small ones", {16, 16, 16, 16, 16, 16}, {{0, 1, 2, 3, 4, 5}}, {}},
      {"six that are too large together: 5 calls saved, 4 and 1.2 spent",
       {200, 200, 200, 200, 200, 200},
       {},
       {0, 1, 2, 3, 4, 5}},
      {"a large tensor among small ones goes alone",
       {16, 16, 16, 1001, 16, 16, 16},
       {{0, 1, 2, 4, 5, 6}},
       {3}},
      {"the largest that is fused",
       {16, 16, 16, 1000, 16, 16, 16, 16},
       {{0, 1, 2, 3, 4, 5, 6, 7}},
       {}},
      {"empty tensors make no call", {0, 16, 0}, {}, {0, 1, 2}},
  };
  for (const Case& each : cases) {
    INFO(each.what);
    const FusionDecision decision = decide_fusion(tensors_of(each.bytes), round_cost());
    std::vector<Indices> batches;
    for (const FusionBatch& batch : decision.batches) {
      batches.push_back(batch.tensors);
    }
    REQUIRE(batches == each.batches);
    REQUIRE(decision.direct == each.direct);
  }
}

TEST_CASE("fusion policy: kinds are not mixed") {
  std::vector<FusionTensor> tensors;
  for (std::uint32_t i = 0; i < 20; ++i) {
    tensors.push_back({16, i % 2});
  }
  tensors.push_back({16, 7});
  const FusionDecision decision = decide_fusion(tensors, round_cost());
  REQUIRE(decision.batches.size() == 2);
  REQUIRE(decision.batches[1].kind == 1);
  REQUIRE(decision.batches[1].tensors == Indices{1, 3, 5, 7, 9, 11, 13, 15, 17, 19});
  REQUIRE(decision.direct == Indices{20});
}

TEST_CASE("fusion policy: batches fit the buffer, begin aligned, and hold each tensor once") {
  std::mt19937 random(5);
  FusionCost cost;
  cost.buffer_bytes = 1 << 16;
  std::vector<FusionTensor> tensors;
  for (int i = 0; i < 2000; ++i) {
    tensors.push_back({random() % 3000, static_cast<std::uint32_t>(random() % 3)});
  }
  const FusionDecision decision = decide_fusion(tensors, cost);
  std::vector<int> seen(tensors.size(), 0);
  for (const std::size_t index : decision.direct) {
    ++seen[index];
  }
  REQUIRE(decision.batches.size() >= 2000 * 1500 / (1 << 16));
  for (const FusionBatch& batch : decision.batches) {
    REQUIRE(batch.bytes <= cost.buffer_bytes);
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < batch.tensors.size(); ++i) {
      const FusionTensor& tensor = tensors[batch.tensors[i]];
      REQUIRE(tensor.kind == batch.kind);
      REQUIRE(batch.offsets[i] % kFusionAlignment == 0);
      REQUIRE(batch.offsets[i] >= end);
      REQUIRE(batch.offsets[i] < end + kFusionAlignment);
      end = batch.offsets[i] + tensor.bytes;
      ++seen[batch.tensors[i]];
    }
    REQUIRE(batch.bytes == end);
  }
  REQUIRE(seen == std::vector<int>(tensors.size(), 1));
}

TEST_CASE("fusion policy: a tensor that fills the buffer, or would not fit it") {
  FusionCost cost = round_cost();
  cost.buffer_bytes = 100;
  REQUIRE(largest_fused_bytes(cost) == 100);
  const std::vector<std::uint64_t> bytes(3, 101);
  REQUIRE(decide_fusion(tensors_of(bytes), cost).direct == Indices{0, 1, 2});
  cost.buffer_bytes = 0;
  REQUIRE(decide_fusion(tensors_of({1, 2}), cost).direct == Indices{0, 1});
  REQUIRE(largest_fused_bytes(round_cost()) == 1000);
}

TEST_CASE("fusion policy: defaults send small gradients through the buffer, and buckets directly") {
  const std::vector<std::uint64_t> small(1000, 4096);
  REQUIRE(decide_fusion(tensors_of(small), {}).batches.size() == 1);
  const std::vector<std::uint64_t> buckets(4, std::uint64_t{25} << 20);
  REQUIRE(decide_fusion(tensors_of(buckets), {}).batches.empty());
  REQUIRE(decide_fusion(tensors_of(buckets), {}).direct.size() == 4);
}
