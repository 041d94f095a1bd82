#include <deque>
#include <map>
#include <numeric>
#include <random>

#include "catch.h"
#include "core/error.h"
#include "named/agreement.h"
#include "named/fusion.h"

using namespace horon;  // NOLINT

namespace {

const Clock::time_point kStart{};

std::shared_ptr<NamedRequest> request(const std::string& name, int process_set = 0) {
  auto made = std::make_shared<NamedRequest>();
  made->process_set = process_set;
  made->tensors.resize(1);
  made->tensors[0].name = name;
  made->tensors[0].shape = {4, 2};
  return made;
}

std::shared_ptr<NamedRequest> new_set(const std::string& name, std::vector<std::int32_t> ranks) {
  auto made = request(name);
  made->kind = NamedKind::kAddProcessSet;
  made->ranks = std::move(ranks);
  return made;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string failure_of(const RequestPtr& a, const RequestPtr& b) {
  Agreement agreement(2);
  agreement.announce(0, a, kStart);
  REQUIRE(agreement.take().empty());
  agreement.announce(1, b, kStart);
  const auto decisions = agreement.take();
  REQUIRE(decisions.size() == 1);
  REQUIRE(decisions[0].type == Decision::Type::kFail);
  REQUIRE(decisions[0].only_ranks == std::vector<int>{0, 1});
  REQUIRE_FALSE(agreement.is_waiting());
  return decisions[0].text;
}

}  // namespace

TEST_CASE("named agreement: all have announced, in any order") {
  Agreement agreement(3);
  agreement.announce(2, request("a"), kStart);
  agreement.announce(0, request("b"), kStart);
  agreement.announce(1, request("b"), kStart);
  agreement.announce(0, request("a"), kStart);
  REQUIRE(agreement.take().empty());
  agreement.announce(2, request("b"), kStart);
  agreement.announce(1, request("a"), kStart);
  const auto decisions = agreement.take();
  REQUIRE(decisions.size() == 2);
  REQUIRE(decisions[0].request->name() == "b");
  REQUIRE(decisions[1].request->name() == "a");
}

TEST_CASE("named agreement: disagreements, in Horovod's words") {
  const auto a = request("x");
  auto b = request("x");
  b->tensors[0].dtype = DType::kFloat64;
  REQUIRE(has(failure_of(a, b),
              "Mismatched data types: One rank had type float32, but another rank had type "
              "float64."));
  b = request("x");
  b->kind = NamedKind::kAllGather;
  REQUIRE(has(failure_of(a, b),
              "Mismatched operations: One rank did an ALLREDUCE, but another rank did an "
              "ALLGATHER."));
  b = request("x");
  b->tensors[0].shape = {8};
  REQUIRE(has(failure_of(a, b),
              "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [4, 2], but "
              "another rank sent a tensor of shape [8]."));
  b = request("x");
  b->op = NamedOp::kMin;
  REQUIRE(has(failure_of(a, b), "Mismatched reduction operation:"));
  b = request("x");
  b->prescale = 2;
  REQUIRE(has(failure_of(a, b), "Mismatched prescale and/or postscale factors:"));
  b = request("x");
  b->device = DeviceKind::kCuda;
  REQUIRE(has(failure_of(a, b), "CPU/GPU device selection:"));
  auto c = request("x");
  c->kind = NamedKind::kBroadcast;
  b = std::make_shared<NamedRequest>(*c);
  b->root = 1;
  const std::string text = failure_of(c, b);
  REQUIRE(has(text, "root ranks: One rank specified root rank 0"));
  REQUIRE(has(text, "Tensor 'x': rank 0 "));
  b = request("x");
  b->tensors.push_back(b->tensors[0]);
  REQUIRE(has(failure_of(a, b), "Mismatched groups:"));
}

TEST_CASE("named agreement: different priorities are no disagreement") {
  Agreement agreement(2);
  auto b = request("x");
  b->priority = 5;
  agreement.announce(0, request("x"), kStart);
  agreement.announce(1, b, kStart);
  const auto decisions = agreement.take();
  REQUIRE(decisions.at(0).type == Decision::Type::kRun);
  REQUIRE(decisions[0].request->priority == 0);
}

TEST_CASE("named agreement: what comes again gets a number, what comes once does not") {
  Agreement agreement(2);
  const auto run = [&](const RequestPtr& what) {
    agreement.announce(0, what, kStart);
    agreement.announce(1, what, kStart);
    return agreement.take().at(0);
  };
  REQUIRE(run(request("x")).id == kNoId);
  const Decision second = run(request("x"));
  REQUIRE(second.type == Decision::Type::kRun);
  REQUIRE(second.id == 0);
  agreement.announce_known(0, 0, kStart);
  agreement.announce(1, request("x"), kStart);
  const auto third = agreement.take();
  REQUIRE(third.at(0).type == Decision::Type::kRunKnown);
  REQUIRE(third[0].id == 0);
  REQUIRE_THROWS_AS(agreement.announce_known(0, 1, kStart), Error);
}

TEST_CASE("named agreement: joined ranks take part in reductions") {
  Agreement agreement(3);
  agreement.announce(0, request("x"), kStart);
  agreement.join(2);
  REQUIRE(agreement.take().empty());
  agreement.announce(1, request("x"), kStart);
  REQUIRE(agreement.take().at(0).type == Decision::Type::kRun);
  agreement.join(0);
  REQUIRE(agreement.take().empty());
  agreement.join(1);
  const auto decisions = agreement.take();
  REQUIRE(decisions.at(0).type == Decision::Type::kJoined);
  REQUIRE(decisions[0].value == 1);
  REQUIRE_FALSE(agreement.is_waiting());
  agreement.announce(0, request("x"), kStart);
  REQUIRE(agreement.take().empty());
}

TEST_CASE("named agreement: what joined ranks take part in") {
  using Type = Decision::Type;
  struct Case {
    NamedKind kind;
    const char* refusal;  // null: they always take part
  };
  const auto c = GENERATE(Case{NamedKind::kAllReduce, nullptr}, Case{NamedKind::kBarrier, nullptr},
                          Case{NamedKind::kAllGather, "Allgather is not supported with Join"},
                          Case{NamedKind::kBroadcast, "Broadcast is not supported with Join"},
                          Case{NamedKind::kReduceScatter, "Reducescatter is not supported"},
                          Case{NamedKind::kAllToAll, "Alltoall is not supported with Join"});
  const bool join_everything = GENERATE(false, true);
  Agreement agreement(3, join_everything);
  const auto what = request("x");
  what->kind = c.kind;
  agreement.join(2);
  agreement.announce(0, what, kStart);
  agreement.announce(1, what, kStart);
  const Decision decision = agreement.take().at(0);
  if (c.refusal == nullptr || join_everything) {
    REQUIRE(decision.type == Type::kRun);
  } else {
    REQUIRE(decision.type == Type::kFail);
    REQUIRE(decision.text.find(c.refusal) != std::string::npos);
    REQUIRE(decision.text.find("rank 2") != std::string::npos);
  }
  // The name is free again, and the others can finish.
  agreement.announce(0, what, kStart);
  agreement.announce(1, what, kStart);
  REQUIRE(agreement.take().at(0).type == decision.type);
  agreement.join(0);
  agreement.join(1);
  REQUIRE(agreement.take().at(0).type == Type::kJoined);
}

TEST_CASE("named agreement: a joined root has nothing to broadcast") {
  Agreement agreement(2, true);
  const auto what = request("x");
  what->kind = NamedKind::kBroadcast;
  what->root = 1;
  agreement.join(1);
  agreement.announce(0, what, kStart);
  REQUIRE(agreement.take().at(0).type == Decision::Type::kFail);
}

TEST_CASE("named agreement: a join completes a removal that takes the next operation with it") {
  Agreement agreement(3, true);
  for (int rank = 0; rank < 3; ++rank) {
    agreement.announce(rank, new_set("add", {0, 1}), kStart);
  }
  REQUIRE(agreement.take().at(0).value == 1);
  auto remove = request("remove");
  remove->kind = NamedKind::kRemoveProcessSet;
  remove->root = 1;
  agreement.announce(1, remove, kStart);
  agreement.announce(0, request("x", 1), kStart);
  agreement.announce(0, request("y", 1), kStart);
  agreement.announce(0, remove, kStart);
  agreement.announce(0, request("z"), kStart);
  agreement.announce(1, request("z"), kStart);
  agreement.join(2);
  const auto decisions = agreement.take();
  REQUIRE(decisions.size() == 4);
  REQUIRE(decisions[0].type == Decision::Type::kFail);
  REQUIRE(decisions[1].type == Decision::Type::kFail);
  REQUIRE(decisions[2].type == Decision::Type::kSetRemoved);
  REQUIRE(decisions[3].request->name() == "z");
}

TEST_CASE("named agreement: process sets come and go") {
  Agreement agreement(3);
  for (int rank = 0; rank < 3; ++rank) {
    agreement.announce(rank, new_set("add", {0, 2}), kStart);
  }
  const auto added = agreement.take();
  REQUIRE(added.at(0).type == Decision::Type::kSetAdded);
  REQUIRE(added[0].value == 1);
  REQUIRE_THROWS_AS(agreement.announce(1, request("x", 1), kStart), Error);
  agreement.announce(0, request("x", 1), kStart);
  auto remove = request("remove");
  remove->kind = NamedKind::kRemoveProcessSet;
  remove->root = 1;
  for (int rank = 0; rank < 3; ++rank) {
    agreement.announce(rank, remove, kStart);
  }
  const auto removed = agreement.take();
  REQUIRE(removed.size() == 2);
  REQUIRE(removed[0].type == Decision::Type::kFail);
  REQUIRE(removed[0].only_ranks == std::vector<int>{0});
  REQUIRE(removed[1].type == Decision::Type::kSetRemoved);
  agreement.announce(2, request("x", 1), kStart);
  REQUIRE(has(agreement.take().at(0).text, "does not exist"));
  for (int rank = 0; rank < 3; ++rank) {
    agreement.announce(rank, new_set("again", {0, 1, 2}), kStart);
  }
  REQUIRE(agreement.take().at(0).is_usage_error);
}

TEST_CASE("named agreement: a rank that leaves fails what needs it, and nothing else") {
  Agreement agreement(3);
  for (int rank = 0; rank < 3; ++rank) {
    agreement.announce(rank, new_set("add", {0, 1}), kStart);
  }
  (void)agreement.take();
  agreement.announce(0, request("x"), kStart);
  agreement.announce(0, request("y", 1), kStart);
  agreement.depart(2, "rank 2 has shut down.");
  const auto decisions = agreement.take();
  REQUIRE(decisions.size() == 2);
  REQUIRE(decisions[0].type == Decision::Type::kFail);
  REQUIRE(decisions[0].name == "x");
  REQUIRE(decisions[1].type == Decision::Type::kGoodbye);
  agreement.announce(1, request("y", 1), kStart);
  REQUIRE(agreement.take().at(0).type == Decision::Type::kRun);
  agreement.announce(1, request("z"), kStart);
  REQUIRE(has(agreement.take().at(0).text, "rank 2"));
}

TEST_CASE("named agreement: stalls name who has it and who has not") {
  Agreement agreement(3);
  agreement.announce(1, request("x"), kStart);
  REQUIRE(agreement.stalled(kStart + std::chrono::seconds(9), std::chrono::seconds(10)).empty());
  const auto late = kStart + std::chrono::seconds(61);
  const std::string report = stall_report(agreement.stalled(late, std::chrono::seconds(60)));
  REQUIRE(has(report, "ALLREDUCE 'x': announced by rank 1; missing: ranks 0 and 2; for 61 s"));
  agreement.fail_stalled(late, std::chrono::seconds(60));
  REQUIRE(has(agreement.take().at(0).text, "was given up after 61 s: rank 1 announced it"));
  REQUIRE(stall_report({}).empty());
}

namespace {

// A model of all ranks. Execution blocks: a rank that has reached a batch waits until all members
// of its process set (but those that are not in it) have reached it.
class Simulation {
 public:
  Simulation(int n_ranks, unsigned seed) : n_(n_ranks), random_(seed), agreement_(n_ranks) {
    sets_[0] = {};
    for (int rank = 0; rank < n_; ++rank) {
      sets_[0].push_back(rank);
    }
    ranks_.resize(static_cast<std::size_t>(n_));
  }

  void run(int n_names) {
    add_sets();
    for (int name = 0; name < n_names; ++name) {
      const int set = static_cast<int>(random_() % sets_.size());
      for (const int rank : sets_[set]) {
        // Some ranks run out of data early, and join.
        if (rank % 5 != 4 || set != 0 || name < n_names / 2) {
          ranks_[at(rank)].to_announce.push_back(request(concat("t", name), set));
        }
        expected_[concat("t", name)] = set;
      }
    }
    for (Rank& rank : ranks_) {
      std::shuffle(rank.to_announce.begin(), rank.to_announce.end(), random_);
    }
    while (advance()) {
    }
    for (int rank = 0; rank < n_; ++rank) {
      INFO("rank " << rank << " of " << n_);
      REQUIRE(ranks_[at(rank)].to_announce.empty());
      REQUIRE(ranks_[at(rank)].to_run.empty());
      REQUIRE(ranks_[at(rank)].has_joined);
    }
    REQUIRE(n_run_ == expected_.size());
    REQUIRE(is_joined_);
    REQUIRE_FALSE(agreement_.is_waiting());
  }

 private:
  struct Rank {
    std::deque<RequestPtr> to_announce;
    std::deque<std::vector<std::string>> to_run;  // batches
    bool has_joined = false;
  };

  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

  void add_sets() {
    for (int i = 0; i < 4; ++i) {
      std::vector<std::int32_t> members;
      for (int rank = 0; rank < n_; ++rank) {
        if (random_() % 2 == 0 || rank == i % n_) {
          members.push_back(rank);
        }
      }
      for (int rank = 0; rank < n_; ++rank) {
        agreement_.announce(rank, new_set(concat("add", i), members), kStart);
      }
      for (const Decision& decision : agreement_.take()) {
        if (decision.type == Decision::Type::kSetAdded) {
          sets_[decision.value].assign(members.begin(), members.end());
        }
      }
    }
    // Numbers without a gap, for choosing at random.
    std::map<int, std::vector<int>> dense;
    for (auto& [id, ranks] : sets_) {
      dense[id] = ranks;
    }
    sets_ = std::move(dense);
  }

  // Each rank does one thing, or is late. False when no rank can do anything.
  bool advance() { return pass(8) || pass(0); }

  bool pass(unsigned one_of_so_many_is_late) {
    std::vector<int> order(at(n_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    bool moved = false;
    for (const int rank : order) {
      const bool is_late = one_of_so_many_is_late > 0 && random_() % one_of_so_many_is_late == 0;
      moved = (!is_late && act(rank)) || moved;
    }
    deliver();
    return moved;
  }

  bool act(int rank) {
    Rank& self = ranks_[at(rank)];
    // Announcing goes on while an operation runs.
    if (!self.to_announce.empty()) {
      const std::size_t burst = 1 + random_() % 7;
      for (std::size_t i = 0; i < burst && !self.to_announce.empty(); ++i) {
        agreement_.announce(rank, self.to_announce.front(), kStart);
        self.to_announce.pop_front();
      }
      (void)try_run(rank);
      return true;
    }
    if (!self.has_joined) {
      self.has_joined = true;
      agreement_.join(rank);
      return true;
    }
    return try_run(rank);
  }

  // Runs the first batch if all members have it as their first.
  bool try_run(int rank) {
    Rank& self = ranks_[at(rank)];
    if (self.to_run.empty()) {
      return false;
    }
    const std::vector<std::string> batch = self.to_run.front();
    const std::vector<int>& members = sets_.at(expected_.at(batch[0]));
    for (const int member : members) {
      const Rank& other = ranks_[at(member)];
      if (other.to_run.empty() || other.to_run.front() != batch) {
        return false;
      }
    }
    for (const int member : members) {
      ranks_[at(member)].to_run.pop_front();
    }
    n_run_ += batch.size();
    return true;
  }

  void deliver() {
    const std::vector<Decision> decisions = agreement_.take();
    for (int rank = 0; rank < n_; ++rank) {
      std::vector<FusionItem> items;
      for (const Decision& decision : decisions) {
        REQUIRE(decision.type != Decision::Type::kFail);
        if (decision.type == Decision::Type::kJoined) {
          is_joined_ = true;
        } else if (agreement_.is_member(decision.process_set, rank)) {
          items.push_back({decision.request.get(), 0});
        }
      }
      for (const Batch& batch : plan_fusion(items, {100, 1000})) {
        std::vector<std::string> names;
        for (const std::size_t index : batch) {
          names.push_back(items[index].request->name());
        }
        ranks_[at(rank)].to_run.push_back(std::move(names));
      }
    }
  }

  const int n_;
  std::mt19937 random_;
  Agreement agreement_;
  std::map<int, std::vector<int>> sets_;
  std::map<std::string, int> expected_;
  std::vector<Rank> ranks_;
  std::size_t n_run_ = 0;
  bool is_joined_ = false;
};

}  // namespace

TEST_CASE("named agreement: simulated ranks always agree and never deadlock") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    const int n_ranks = 1 + static_cast<int>(seed * 7 % 33);
    INFO("seed " << seed << ", " << n_ranks << " ranks");
    Simulation(n_ranks, seed).run(60);
  }
}

TEST_CASE("named agreement: a thousand simulated ranks") { Simulation(1000, 7).run(25); }
