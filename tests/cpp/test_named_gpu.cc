// The named engine with operations on devices, on GPUs that are host memory.

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "catch.h"
#include "named_ranks.h"

using namespace horon;           // NOLINT
using namespace horon::testing;  // NOLINT

namespace {

using Values = std::vector<std::int32_t>;

std::shared_ptr<GpuOperation> on_gpu(NamedKind kind, const std::string& name, Values values,
                                     int process_set = 0) {
  return std::make_shared<GpuOperation>(kind, name, std::move(values), process_set);
}

// The GPUs of all process sets, and a rank that has none.
class Machine {
 public:
  std::shared_ptr<FakeGpus> gpus_of(int set, int n_ranks) {
    const std::lock_guard lock(mutex_);
    auto& gpus = gpus_[set];
    if (!gpus) {
      gpus = std::make_shared<FakeGpus>(n_ranks);
    }
    return gpus;
  }

  GpuMaker maker(int rank) {
    return [this, rank](int set, int place, int n_ranks) {
      auto gpu = std::make_shared<FakeDeviceBatches>(
          rank == rank_without ? nullptr : gpus_of(set, n_ranks), place, n_ranks);
      const std::lock_guard lock(mutex_);
      batches_[{rank, set}] = gpu;
      return gpu;
    };
  }

  std::shared_ptr<FakeDeviceBatches> batches_of(int rank, int set = 0) {
    const std::lock_guard lock(mutex_);
    return batches_.at({rank, set});
  }

  int rank_without = -1;

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<FakeGpus>> gpus_;
  std::map<std::pair<int, int>, std::shared_ptr<FakeDeviceBatches>> batches_;
};

void run_with_gpus(int n_ranks, const std::function<void(NamedEngine&, int, Machine&)>& body,
                   int rank_without = -1, bool join_everything = false) {
  MemoryStore store;
  Machine machine;
  machine.rank_without = rank_without;
  NamedOptions options;
  options.join_everything = join_everything;
  require_no_errors(run_ranks(n_ranks, [&](int rank) {
    const auto engine =
        make_engine(store, rank, n_ranks, options, ControlKind::kShm, machine.maker(rank));
    body(*engine, rank, machine);
    engine->shutdown();
  }));
}

void await(const std::function<bool()>& condition, const char* what) {
  const Deadline deadline = patient();
  while (!condition()) {
    expect(!deadline.has_passed(), what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void must_come(NamedEngine& engine, const std::shared_ptr<GpuOperation>& operation) {
  must_complete(engine, operation);
  await([&] { return operation->has_come(); }, "it never came");
}

}  // namespace

TEST_CASE("named on GPUs: random orders, mixed with operations on the CPU") {
  for (const int n : {1, 2, 3}) {
    run_with_gpus(n, [n](NamedEngine& engine, int rank, Machine& /*machine*/) {
      for (int round = 0; round < 3; ++round) {
        constexpr int kNames = 120;
        std::vector<int> order(kNames);
        std::iota(order.begin(), order.end(), 0);
        std::mt19937 random(static_cast<unsigned>(100 * round + rank));
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::shared_ptr<NamedOperation>> operations(kNames);
        std::vector<std::uint64_t> handles(kNames);
        for (const int i : order) {
          const auto at = static_cast<std::size_t>(i);
          if (i % 3 == 0) {
            operations[at] = std::make_shared<FloatOperation>(NamedKind::kAllReduce, concat("t", i),
                                                              std::vector<float>(at + 1, float(i)));
          } else {
            operations[at] = on_gpu(NamedKind::kAllReduce, concat("t", i), Values(at * 9 + 1, i));
          }
          handles[at] = engine.submit(operations[at]);
        }
        for (std::size_t i = 0; i < kNames; ++i) {
          engine.wait(handles[i], nullptr);
          expect(!operations[i]->error, error_text(*operations[i]));
          await([&] { return operations[i]->has_come(); }, "it never came");
          const int sum = n * static_cast<int>(i);
          if (i % 3 == 0) {
            for (const float value : static_cast<FloatOperation&>(*operations[i]).data) {
              expect(value == static_cast<float>(sum), "wrong sum of floats");
            }
          } else {
            for (const std::int32_t value : static_cast<GpuOperation&>(*operations[i]).data) {
              expect(value == sum, "wrong sum");
            }
          }
        }
      }
    });
  }
}

TEST_CASE("named on GPUs: every kind of operation") {
  run_with_gpus(3, [](NamedEngine& engine, int rank, Machine& /*machine*/) {
    const auto n_own = static_cast<std::size_t>(rank);
    auto gather = on_gpu(NamedKind::kAllGather, "gather", Values(n_own, rank));
    must_come(engine, gather);
    expect(gather->result == Values{1, 2, 2}, "allgather");

    auto broadcast = on_gpu(NamedKind::kBroadcast, "broadcast", {rank, rank});
    broadcast->editable->root = 2;
    must_come(engine, broadcast);
    expect(broadcast->data == Values{2, 2}, "broadcast");

    auto exchange = on_gpu(NamedKind::kAllToAll, "alltoall", Values(3 + 3 * n_own, rank));
    exchange->splits.assign(3, rank + 1);
    must_come(engine, exchange);
    expect(exchange->result == Values{0, 1, 1, 2, 2, 2}, "alltoall");
    expect(exchange->received_splits == std::vector<std::int64_t>{1, 2, 3}, "received splits");

    for (const std::int32_t rows : {3, 4}) {  // even and uneven parts
      Values part(static_cast<std::size_t>(rows_of(rows, rank, 3)), -1);
      Values values(static_cast<std::size_t>(rows));
      std::iota(values.begin(), values.end(), 1);
      auto scatter = on_gpu(NamedKind::kReduceScatter, concat("reducescatter", rows), values);
      scatter->tensors[0].output = {reinterpret_cast<std::byte*>(part.data()),
                                    part.size() * sizeof(std::int32_t)};
      must_come(engine, scatter);
      const Values even[] = {{3}, {6}, {9}};
      const Values uneven[] = {{3, 6}, {9}, {12}};
      expect(part == (rows == 3 ? even : uneven)[rank], "reducescatter");
    }
  });
}

TEST_CASE("named on GPUs: done is queued, and poll tells what has come") {
  run_with_gpus(2, [](NamedEngine& engine, int rank, Machine& machine) {
    FakeGpus& gpus = *machine.gpus_of(0, 2);
    gpus.hold();
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "held"));
    auto first = on_gpu(NamedKind::kAllReduce, "first", {rank + 1});
    auto second = on_gpu(NamedKind::kAllReduce, "second", {10});
    const std::uint64_t handle = engine.submit(first);
    must_complete(engine, second);  // the host waits for no GPU
    expect(!second->has_come(), "it came though it is held");
    expect(!engine.poll(handle), "poll says that it has come");
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "looked"));
    if (rank == 0) {
      gpus.release();
    }
    await([&] { return engine.poll(handle); }, "it never came");
    expect(first->data[0] == 3, "wrong sum");
    engine.wait(handle, nullptr);
  });
}

TEST_CASE(
    "named on GPUs: a GPU that has two batches is left to gather more, unless somebody waits") {
  run_with_gpus(2, [](NamedEngine& engine, int rank, Machine& machine) {
    FakeGpus& gpus = *machine.gpus_of(0, 2);
    const auto meet = [&](const std::string& name) {
      must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, name));
    };
    int n_left_alone = 0;
    for (int i = 0; i < 10; ++i) {
      meet(concat("begin", i));
      gpus.hold();
      meet(concat("held", i));
      std::vector<std::shared_ptr<GpuOperation>> first;
      for (int j = 0; j < 2; ++j) {
        first.push_back(on_gpu(NamedKind::kAllReduce, concat("first", i, '.', j), {1}));
        must_complete(engine, first.back());
      }
      std::vector<std::shared_ptr<GpuOperation>> later;
      std::vector<std::uint64_t> handles;
      for (int j = 0; j < 5; ++j) {
        later.push_back(on_gpu(NamedKind::kAllReduce, concat("later", i, '.', j), {rank + j}));
        handles.push_back(engine.submit(later.back()));
        std::this_thread::sleep_for(2 * kGatherOnDevice.time);
      }
      n_left_alone += gpus.n_queued(rank) == 2 ? 1 : 0;
      switch (i % 3) {
        case 0:  // whoever waits does not wait for the GPU
          engine.wait(handles.back(), nullptr);
          expect(!later.back()->has_come(), "it came though it is held");
          break;
        case 1:  // neither does anybody else, for long
          await([&] { return gpus.n_queued(rank) > 2; }, "it was never queued");
          break;
        default:
          break;
      }
      if (i % 3 == 2) {
        gpus.release();
        for (const auto& operation : later) {
          await([&] { return operation->has_come(); }, "it never came");
        }
      }
      meet(concat("queued", i));
      gpus.release();
      for (std::size_t j = 0; j < later.size(); ++j) {
        engine.wait(handles[j], nullptr);
        await([&] { return later[j]->has_come(); }, "it never came");
        expect(later[j]->data[0] == static_cast<std::int32_t>(1 + 2 * j), "wrong sum");
      }
    }
    // On a slow machine the longest time may have passed now and then.
    expect(n_left_alone > 0, "all were queued at once");
  });
}

TEST_CASE("named on GPUs: a GPU that fails ends the job on all ranks, though nobody waits") {
  run_with_gpus(3, [](NamedEngine& engine, int rank, Machine& machine) {
    must_come(engine, on_gpu(NamedKind::kAllReduce, "good", {1}));
    FakeGpus& gpus = *machine.gpus_of(0, 3);
    gpus.hold();
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "held"));
    must_complete(engine, on_gpu(NamedKind::kAllReduce, "bad", {1}));
    if (rank == 1) {
      machine.batches_of(1)->fails = true;
    }
    await([&] { return !engine.is_running(); }, "the failure was not seen");
    const auto later = on_gpu(NamedKind::kAllReduce, "later", {1});
    complete(engine, later);
    expect(contains(error_text(*later), "rank 1: the GPU has fallen off the bus"),
           error_text(*later));
    await([&] { return machine.batches_of(rank)->is_aborted.load(); }, "it was not aborted");
  });
}

TEST_CASE(
    "named on GPUs: a rank whose GPU waits for the others' sees that one of them has failed") {
  run_with_gpus(2, [](NamedEngine& engine, int rank, Machine& machine) {
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "begin"));
    if (rank == 0) {
      machine.batches_of(0)->waits_for_others = true;
    } else {
      machine.batches_of(1)->is_aborted = true;
    }
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "set"));
    const auto operation = on_gpu(NamedKind::kAllReduce, "first", {1});
    complete(engine, operation);
    expect(contains(error_text(*operation), "rank 1: "), error_text(*operation));
    expect(contains(error_text(*operation), "it was aborted"), error_text(*operation));
  });
}

TEST_CASE("named on GPUs: process sets have their own") {
  run_with_gpus(3, [](NamedEngine& engine, int rank, Machine& machine) {
    for (const auto& ranks : {std::vector<std::int32_t>{0, 1}, std::vector<std::int32_t>{1, 2}}) {
      must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kAddProcessSet,
                                                              concat("add", ranks[0]), ranks));
    }
    for (const int set : {1, 2}) {
      if (rank == 1 || (rank == 0) == (set == 1)) {
        auto operation = on_gpu(NamedKind::kAllReduce, concat("s", set), {5}, set);
        must_come(engine, operation);
        expect(operation->data[0] == 10, "wrong sum");
      }
    }
    expect(machine.gpus_of(0, 3)->n_calls() == 0, "the set of all ranks was used");
    must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kBarrier, "end"));
  });
}

TEST_CASE("named on GPUs: ranks that have joined bring zeros, and no rows") {
  run_with_gpus(
      3,
      [](NamedEngine& engine, int rank, Machine& /*machine*/) {
        for (int i = 0; i < 3 * rank; ++i) {
          const int n_joined = i / 3;
          std::vector<std::shared_ptr<GpuOperation>> group;
          std::vector<std::uint64_t> handles;
          for (int j = 0; j < 5; ++j) {
            group.push_back(on_gpu(NamedKind::kAllReduce, concat("u", i, '.', j), Values(7, 1)));
            handles.push_back(engine.submit(group.back()));
          }
          for (std::size_t j = 0; j < group.size(); ++j) {
            engine.wait(handles[j], nullptr);
            await([&] { return group[j]->has_come(); }, "it never came");
            expect(group[j]->data == Values(7, 2 - n_joined), "joined ranks count as zeros");
          }
          auto rows = on_gpu(NamedKind::kAllGather, concat("g", i), {rank});
          must_come(engine, rows);
          expect(rows->result == (n_joined == 0 ? Values{1, 2} : Values{2}), "no rows of them");
        }
        auto join = std::make_shared<SignalOperation>(NamedKind::kJoin, kJoinName);
        must_complete(engine, join);
        expect(join->value == 2, "the last to join");
      },
      -1, true);
}

TEST_CASE("named on GPUs: a joined rank without a GPU is named, and the CPU goes on") {
  run_with_gpus(
      3,
      [](NamedEngine& engine, int rank, Machine& /*machine*/) {
        if (rank != 2) {
          for (int i = 0; i < 2; ++i) {
            auto operation = on_gpu(NamedKind::kAllReduce, concat("g", i), {1});
            complete(engine, operation);
            expect(contains(error_text(*operation), "rank 2 of the process set can not take part"),
                   error_text(*operation));
          }
          auto on_cpu = std::make_shared<FloatOperation>(NamedKind::kAllReduce, "c",
                                                         std::vector<float>{1.0F});
          must_complete(engine, on_cpu);
          expect(on_cpu->data[0] == 2, "wrong sum");
        }
        must_complete(engine, std::make_shared<SignalOperation>(NamedKind::kJoin, kJoinName));
      },
      2);
}

TEST_CASE("named on GPUs: a CPU tensor on one rank is a mismatch of devices") {
  run_with_gpus(2, [](NamedEngine& engine, int rank, Machine& /*machine*/) {
    std::shared_ptr<NamedOperation> operation;
    if (rank == 0) {
      operation =
          std::make_shared<FloatOperation>(NamedKind::kAllReduce, "x", std::vector<float>{1.0F});
    } else {
      operation = on_gpu(NamedKind::kAllReduce, "x", {1});
    }
    complete(engine, operation);
    expect(contains(error_text(*operation),
                    "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device "),
           error_text(*operation));
    must_come(engine, on_gpu(NamedKind::kAllReduce, "x", {1}));
  });
}
