#include "catch.h"
#include "named/fusion.h"

using horon::Batch;
using horon::DType;
using horon::FusionItem;
using horon::FusionOptions;
using horon::NamedKind;
using horon::NamedRequest;
using horon::plan_fusion;

namespace {

NamedRequest request(std::int64_t count, int priority = 0, int process_set = 0) {
  NamedRequest made;
  made.process_set = process_set;
  made.priority = priority;
  made.tensors.resize(1);
  made.tensors[0].name = "x";
  made.tensors[0].shape = {count};
  return made;
}

std::vector<Batch> plan(const std::vector<NamedRequest>& requests, const FusionOptions& options) {
  std::vector<FusionItem> items;
  for (const NamedRequest& each : requests) {
    for (std::size_t tensor = 0; tensor < each.tensors.size(); ++tensor) {
      items.push_back({&each, tensor});
    }
  }
  return plan_fusion(items, options);
}

using Batches = std::vector<Batch>;

}  // namespace

TEST_CASE("named fusion: small tensors of one kind travel together, up to the threshold") {
  const FusionOptions options{100 * 4, 1000};
  REQUIRE(plan({request(40), request(40), request(40)}, options) == Batches{{0, 1}, {2}});
  REQUIRE(plan({}, options).empty());
  REQUIRE(plan({request(0), request(1)}, options) == Batches{{0, 1}});
}

TEST_CASE("named fusion: large tensors, and everything with threshold 0, travel alone") {
  REQUIRE(plan({request(1), request(1000), request(1)}, {1 << 20, 400}) == Batches{{0, 2}, {1}});
  REQUIRE(plan({request(1), request(1)}, {0, 400}) == Batches{{0}, {1}});
}

TEST_CASE("named fusion: nothing that differs is mixed") {
  std::vector<NamedRequest> all(8, request(1));
  all[1].tensors[0].dtype = DType::kFloat64;
  all[2].op = horon::NamedOp::kMax;
  all[3].prescale = 2;
  all[4].postscale = 2;
  all[5].process_set = 1;
  all[6].kind = NamedKind::kAllGather;
  all[7].device = horon::DeviceKind::kCuda;
  REQUIRE(plan(all, {}).size() == 8);
}

TEST_CASE("named fusion: smaller priorities first, then the order of the log") {
  REQUIRE(plan({request(1, 2), request(1, 1), request(1, 2), request(1, 1)}, {4, 400}) ==
          Batches{{1}, {3}, {0}, {2}});
}

TEST_CASE("named fusion: a rank that sees fewer process sets gets the same batches of those") {
  std::vector<NamedRequest> all;
  std::vector<NamedRequest> part;
  for (int i = 0; i < 60; ++i) {
    all.push_back(request(1 + i % 7, i * 7 % 5, i % 3));
    if (i % 3 != 1) {
      part.push_back(all.back());
    }
  }
  const FusionOptions options{40, 24};
  const auto shapes = [&](const std::vector<NamedRequest>& requests) {
    std::vector<std::vector<std::int64_t>> seen;
    for (const Batch& batch : plan(requests, options)) {
      if (requests[batch[0]].process_set == 1) {
        continue;
      }
      seen.emplace_back();
      for (const std::size_t index : batch) {
        seen.back().push_back(requests[index].process_set * 100 +
                              requests[index].tensors[0].shape[0]);
      }
    }
    return seen;
  };
  REQUIRE(shapes(all) == shapes(part));
}
