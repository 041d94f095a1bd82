// The tests that every Transport has to pass. A transport's test file gives a Make function and
// calls them, one per TEST_CASE.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "collective_call.h"
#include "core/transport.h"
#include "rank_threads.h"

namespace horon::testing {

struct Transports {
  std::shared_ptr<void> shared;  // what the transports need; destroyed after them
  std::vector<std::unique_ptr<Transport>> by_rank;
};

// Makes the connected transports of n ranks.
using Make = std::function<Transports(int n_ranks)>;

// Whether a transport promises to add up in the order of ranks.
enum class Order : std::uint8_t { kOfRanks, kAny };

inline const std::vector<OpKind>& all_kinds() {
  static const std::vector<OpKind> kinds = [] {
    std::vector<OpKind> all;
    for (int kind = 0; kind <= static_cast<int>(OpKind::kAllToAllSingle); ++kind) {
      all.push_back(static_cast<OpKind>(kind));
    }
    return all;
  }();
  return kinds;
}

// Runs a call that must succeed, and checks its result.
inline void run_and_check(Transport& transport, const Plan& plan, int rank) {
  RankCall call(plan, rank);
  try {
    transport.run(call.request, patient_context());
  } catch (const std::exception& error) {
    expect(false, call.describe(), " threw ", error.what());
  }
  const std::string problem = call.check_result();
  expect(problem.empty(), call.describe(), ": ", problem);
}

// Runs a call on which the ranks disagree: a MismatchError, and nothing written.
inline void run_mismatch(Transport& transport, const Plan& plan, int rank,
                         const std::string& what) {
  RankCall call(plan, rank);
  const std::exception_ptr error =
      error_of([&] { transport.run(call.request, patient_context()); });
  expect(threw<MismatchError>(error), call.describe(), " with another ", what, " elsewhere threw '",
         text_of(error), "'");
  const std::string problem = call.check_untouched();
  expect(problem.empty(), call.describe(), " with another ", what, ": ", problem);
}

// The ops that suit a plan's dtype, one of them for each `turn`.
inline ReduceOp op_for(DType dtype, int turn) {
  for (int i = 0;; ++i) {
    const auto op = static_cast<ReduceOp>((turn + i) % kReduceOpCount);
    if (is_reducible(dtype, op)) {
      return op;
    }
  }
}

// All the plans of one n: kinds x dtypes x counts, uneven and in place where that exists.
inline std::vector<Plan> plans_for(int n_ranks, Order order = Order::kOfRanks) {
  std::vector<Plan> plans;
  int turn = 0;
  for (const OpKind kind : all_kinds()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kBool,
                              DType::kComplex128, DType::kOpaque}) {
      if (has_reduction(kind) && dtype == DType::kOpaque) {
        continue;
      }
      // 10000 elements fill more than one buffer of 4096 bytes with every dtype.
      for (const std::uint64_t count : {0, 1, 3, 17, 1000, 5000, 10000}) {
        if (count > 1000 && (turn + static_cast<int>(dtype)) % 2 == 1 && kHasThreadSanitizer) {
          continue;
        }
        ++turn;
        Plan plan;
        plan.kind = kind;
        plan.dtype = dtype;
        plan.n_ranks = n_ranks;
        plan.root = turn % n_ranks;
        plan.count = count;
        plan.is_uneven = turn % 3 == 0;
        plan.is_in_place = turn % 2 == 0 && pattern(kind) != Pattern::kNone;
        plan.op = has_reduction(kind) ? op_for(dtype, turn) : ReduceOp::kSum;
        plan.seed = static_cast<unsigned>(turn);
        plan.adds_exactly = order == Order::kAny;
        plans.push_back(plan);
      }
    }
  }
  return plans;
}

inline void test_all_kinds(const Make& make, Order order = Order::kOfRanks) {
  for (int n = 1; n <= 5; ++n) {
    const Transports transports = make(n);
    const std::vector<Plan> plans = plans_for(n, order);
    require_no_errors(run_ranks(n, [&](int rank) {
      for (const Plan& plan : plans) {
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)], plan, rank);
      }
    }));
  }
}

// A call's tensor, cut at random into pieces that lie anywhere.
class CutTensor {
 public:
  CutTensor(Request& request, unsigned seed) : request_(request) {
    std::mt19937 random(seed);
    for (std::size_t begin = 0; begin < request.inputs[0].bytes;) {
      const std::size_t left = request.inputs[0].bytes - begin;
      const std::size_t bytes = std::min(left, (1 + random() % 700) * request.element_bytes);
      inputs_.emplace_back(request.inputs[0].data + begin, request.inputs[0].data + begin + bytes);
      outputs_.emplace_back(bytes);
      const bool is_in_place = random() % 2 == 0;
      pieces_.add(inputs_.back().data(), (is_in_place ? inputs_ : outputs_).back().data(), bytes);
      begin += bytes;
    }
    request.pieces = &pieces_;
    input_ = request.inputs[0].data;
    output_ = request.outputs[0].data;
    request.inputs[0].data = nullptr;
    request.outputs[0].data = nullptr;
  }
  CutTensor(const CutTensor&) = delete;
  CutTensor& operator=(const CutTensor&) = delete;

  // Puts the results where the call expects them.
  void put_together() {
    std::byte* to = output_;
    pieces_.visit(0, pieces_.bytes(),
                  [&](const std::byte*, const std::byte* output, std::size_t bytes) {
                    std::memcpy(to, output, bytes);
                    to += bytes;
                  });
    request_.inputs[0].data = input_;
    request_.outputs[0].data = output_;
    request_.pieces = nullptr;
  }

 private:
  Request& request_;
  TensorPieces pieces_;
  std::vector<Bytes> inputs_;
  std::vector<Bytes> outputs_;
  const std::byte* input_;
  std::byte* output_;
};

// On two ranks of three each tensor is in pieces, on the third in one.
inline void test_pieces(const Make& make) {
  for (int n = 1; n <= 5; ++n) {
    const Transports transports = make(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      Transport& transport = *transports.by_rank[static_cast<std::size_t>(rank)];
      unsigned turn = 0;
      int n_cut = 0;
      for (const DType dtype :
           {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kBool, DType::kComplex128}) {
        for (const std::uint64_t count : {1000, 1023, 5000, 10000}) {
          ++turn;
          Plan plan;
          plan.kind = OpKind::kAllReduce;
          plan.dtype = dtype;
          plan.op = op_for(dtype, static_cast<int>(turn));
          plan.n_ranks = n;
          plan.count = count;
          plan.seed = turn;
          RankCall call(plan, rank);
          if (!transport.takes_pieces(call.request.inputs[0].bytes) ||
              (turn + static_cast<unsigned>(rank)) % 3 == 0) {
            transport.run(call.request, patient_context());
          } else {
            CutTensor cut(call.request, turn * 7 + static_cast<unsigned>(rank));
            transport.run(call.request, patient_context());
            cut.put_together();
            ++n_cut;
          }
          const std::string problem = call.check_result();
          expect(problem.empty(), call.describe(), " in pieces: ", problem);
        }
      }
      expect(n_cut > 5, "only ", n_cut, " calls were in pieces");
    }));
  }
}

// Every reducible dtype and op, on sizes inline and not.
inline void test_all_ops(const Make& make, Order order = Order::kOfRanks) {
  for (const int n : {1, 3}) {
    const Transports transports = make(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      unsigned seed = 0;
      for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
        for (int op = 0; op < kReduceOpCount; ++op) {
          for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
            for (const std::uint64_t count : {5, 1111}) {
              Plan plan;
              plan.kind = kind;
              plan.dtype = static_cast<DType>(dtype);
              plan.op = static_cast<ReduceOp>(op);
              plan.n_ranks = n;
              plan.count = count;
              plan.root = n - 1;
              plan.seed = ++seed;
              plan.adds_exactly = order == Order::kAny;
              Transport& transport = *transports.by_rank[static_cast<std::size_t>(rank)];
              if (is_reducible(plan.dtype, plan.op)) {
                run_and_check(transport, plan, rank);
              } else {
                run_mismatch(transport, plan, rank, "(no) op");
              }
            }
          }
        }
      }
    }));
  }
}

// What a plan becomes on the rank that does something else; the name of the difference.
inline std::string spoil(Plan& plan, std::mt19937& random) {
  const bool has_data = pattern(plan.kind) != Pattern::kNone;
  while (true) {
    switch (random() % 7) {
      case 0:
        plan.refusal = "the test refuses.";
        return "refusal";
      case 1: {
        const OpKind other = all_kinds()[random() % all_kinds().size()];
        if (other == plan.kind) {
          break;
        }
        plan.kind = other;
        plan.op = ReduceOp::kSum;
        return "kind";
      }
      case 2:
        if (has_data) {
          plan.dtype = plan.dtype == DType::kInt64 ? DType::kFloat32 : DType::kInt64;
          return "dtype";
        }
        break;
      case 3:
        if (has_data) {
          plan.count += 1;
          plan.is_uneven = false;
          return "count";
        }
        break;
      case 4:
        if (has_reduction(plan.kind)) {
          plan.op = plan.op == ReduceOp::kMax ? ReduceOp::kMin : ReduceOp::kMax;
          return "op";
        }
        break;
      case 5:
        if (has_root(plan.kind)) {
          plan.root = (plan.root + 1) % plan.n_ranks;
          return "root";
        }
        break;
      default:
        if (has_data) {
          plan.batch_digest += 1;
          return "digest";
        }
    }
  }
}

inline void test_mixed_with_mismatches(const Make& make, Order order = Order::kOfRanks) {
  for (int n = 2; n <= 5; ++n) {
    const Transports transports = make(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      std::mt19937 random(static_cast<unsigned>(n));  // the same on every rank
      Transport& transport = *transports.by_rank[static_cast<std::size_t>(rank)];
      for (unsigned i = 0; i < 300; ++i) {
        constexpr std::uint64_t kCounts[] = {0, 1, 8, 64, 100, 1500, 4000};
        Plan plan;
        plan.kind = all_kinds()[random() % all_kinds().size()];
        plan.dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kInt64;
        plan.op = has_reduction(plan.kind) ? op_for(plan.dtype, static_cast<int>(random() % 5))
                                           : ReduceOp::kSum;
        plan.n_ranks = n;
        plan.root = static_cast<int>(random() % static_cast<unsigned>(n));
        plan.count = kCounts[random() % std::size(kCounts)];
        plan.is_in_place = random() % 2 == 0;
        plan.is_uneven = random() % 4 == 0;
        plan.seed = i;
        plan.adds_exactly = order == Order::kAny;
        if (random() % 3 != 0) {
          run_and_check(transport, plan, rank);
          continue;
        }
        plan.is_uneven = false;
        Plan spoilt = plan;
        const std::string what = spoil(spoilt, random);
        const int culprit = static_cast<int>(random() % static_cast<unsigned>(n));
        run_mismatch(transport, rank == culprit ? spoilt : plan, rank, what);
      }
      Plan last;
      last.kind = OpKind::kAllReduce;
      last.n_ranks = n;
      last.count = 2000;
      last.adds_exactly = order == Order::kAny;
      run_and_check(transport, last, rank);
    }));
  }
}

// Each rank's own factor is used, whoever computes.
inline void test_premul_factors(const Make& make, Order order = Order::kOfRanks) {
  for (int n = 1; n <= 5; ++n) {
    const Transports transports = make(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      for (const std::uint64_t count : {1, 40, 3000}) {
        for (const OpKind kind :
             {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatterSingle}) {
          Plan plan;
          plan.kind = kind;
          plan.op = ReduceOp::kPremulSum;
          plan.adds_exactly = order == Order::kAny;
          plan.n_ranks = n;
          plan.count = count;
          run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)], plan, rank);
        }
      }
    }));
  }
}

inline void test_refusal_names_the_rank(const Make& make) {
  const Transports transports = make(3);
  const Errors errors = run_ranks(3, [&](int rank) {
    Transport& transport = *transports.by_rank[static_cast<std::size_t>(rank)];
    Plan plan;
    plan.kind = OpKind::kAllToAllSingle;
    plan.n_ranks = 3;
    plan.count = 4;
    plan.refusal = rank == 1 ? "its splits are odd." : "";
    RankCall call(plan, rank);
    const std::exception_ptr error =
        error_of([&] { transport.run(call.request, patient_context()); });
    plan.refusal.clear();
    run_and_check(transport, plan, rank);
    std::rethrow_exception(error);
  });
  require_all_threw<MismatchError>(errors);
  for (const std::exception_ptr& error : errors) {
    REQUIRE(contains(text_of(error), "#0: rank 1 has invalid arguments: its splits are odd."));
  }
}

// abort() from another thread wakes a running call, and nothing runs afterwards.
inline void test_abort(const Make& make) {
  for (const int n : {2, 3}) {
    const Transports transports = make(n);
    const Errors errors = run_ranks(n, [&](int rank) {
      Transport& transport = *transports.by_rank[static_cast<std::size_t>(rank)];
      if (rank == n - 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        for (const auto& each : transports.by_rank) {  // as the watcher of each process would
          each->abort("enough of this");
        }
        return;
      }
      const Request barrier;
      const std::exception_ptr error = error_of([&] { transport.run(barrier, patient_context()); });
      expect(threw<GroupError>(error_of([&] { transport.run(barrier, patient_context()); })),
             "a call after abort did not fail");
      std::rethrow_exception(error);
    });
    for (int rank = 0; rank < n - 1; ++rank) {
      const std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
      INFO(text_of(error));
      REQUIRE(threw<GroupError>(error));
      REQUIRE(contains(text_of(error), "enough of this"));
    }
  }
}

// A rank that never comes: an error at the deadline, and the group is over.
inline void test_timeout(const Make& make) {
  const Transports transports = make(2);
  Transport& transport = *transports.by_rank[0];
  Plan plan;
  plan.kind = OpKind::kAllReduce;
  plan.n_ranks = 2;
  plan.count = 3;
  RankCall call(plan, 0);
  REQUIRE_THROWS_AS(transport.run(call.request, WaitContext{soon(), nullptr}), GroupError);
  REQUIRE(call.check_untouched() == "");
  REQUIRE_THROWS_AS(transport.run(Request(), patient_context()), GroupError);
}

// What check_interrupt throws comes out as it is, and the group is over.
inline void test_interrupt(const Make& make) {
  struct Interrupted {};
  const Transports transports = make(2);
  Transport& transport = *transports.by_rank[0];
  const std::function<void()> interrupt = [] { throw Interrupted(); };
  REQUIRE_THROWS_AS(transport.run(Request(), WaitContext{patient(), &interrupt}), Interrupted);
  REQUIRE_THROWS_AS(transport.run(Request(), patient_context()), GroupError);
  // Rank 0 had arrived, so this one may still work for rank 1; the next may not.
  error_of([&] { transports.by_rank[1]->run(Request(), patient_context()); });
  REQUIRE_THROWS_AS(transports.by_rank[1]->run(Request(), patient_context()), GroupError);
}

}  // namespace horon::testing
