#include "shm/window.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <thread>

#include "catch.h"
#include "core/error.h"
#include "rank_threads.h"
#include "shm/shm_transport.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kWindowArenaBytes = std::size_t{32} << 20;

// n ranks with arenas, and what each of them needs to make windows.
class WindowRanks {
 public:
  explicit WindowRanks(int n_ranks) : access_(make_access(n_ranks)) {
    group = std::make_unique<LocalGroup>(n_ranks, small_options(), access_);
    for (int rank = 0; rank < n_ranks; ++rank) {
      transports_.push_back(std::make_unique<ShmTransport>(group->segment(rank), group->peers(rank),
                                                           group->arenas(rank)));
    }
  }

  Arena& arena(int rank) { return *at(access_, rank).own; }
  LentMemory& lent(int rank) { return *at(access_, rank).lent; }
  ShmTransport& transport(int rank) { return *at(transports_, rank); }

  WindowTensor tensor(int rank, std::uint64_t count) {
    WindowTensor tensor;
    tensor.count = count;
    tensor.element_bytes = sizeof(std::uint32_t);
    tensor.dtype = DType::kUInt32;
    tensor.sizes = {static_cast<std::int64_t>(count)};
    if (count > 0) {
      tensor.data = arena(rank).allocate(count * sizeof(std::uint32_t));
      std::memset(tensor.data, 0, count * sizeof(std::uint32_t));
    }
    return tensor;
  }

  std::unique_ptr<Window> make(int rank, const WindowTensor& tensor,
                               OpKind kind = OpKind::kNewWindow, std::uint64_t number = 0) {
    WindowOffer offer(kind, group->shared(rank), at(access_, rank).lent, tensor, "", number);
    try {
      transport(rank).run(offer.request(), patient_context());
    } catch (const MismatchError&) {
      offer.withdraw();
      throw;
    }
    return std::make_unique<Window>(offer.accept());
  }

  void barrier(int rank) { transport(rank).run(Request(), patient_context()); }

  std::unique_ptr<LocalGroup> group;

 private:
  template <typename T>
  static T& at(std::vector<T>& values, int rank) {
    return values[static_cast<std::size_t>(rank)];
  }

  // The thread sanitizer sees no order through two addresses for the same memory: one arena there.
  static std::vector<ArenaAccess> make_access(int n_ranks) {
    std::vector<ArenaAccess> access(static_cast<std::size_t>(n_ranks));
    for (ArenaAccess& mine : access) {
      mine.own = kHasThreadSanitizer && access[0].own ? access[0].own
                                                      : std::make_shared<Arena>(kWindowArenaBytes);
      mine.mapped = std::make_shared<PeerArenas>();
      mine.lent = std::make_shared<LentMemory>();
    }
    return access;
  }

  std::vector<ArenaAccess> access_;
  std::vector<std::unique_ptr<ShmTransport>> transports_;
};

using Words = std::vector<std::uint32_t>;

Words pattern_of(int source, int target, std::size_t count) {
  Words words(count);
  for (std::size_t i = 0; i < count; ++i) {
    words[i] = static_cast<std::uint32_t>(source * 1000003 + target * 7919) +
               static_cast<std::uint32_t>(i);
  }
  return words;
}

const std::byte* bytes_of(const Words& words) {
  return reinterpret_cast<const std::byte*>(words.data());
}

Words read(const std::byte* data, std::size_t count) {
  Words words(count);
  std::memcpy(words.data(), data, count * sizeof(std::uint32_t));
  return words;
}

bool holds(const std::byte* data, const Words& expected) {
  return read(data, expected.size()) == expected;
}

}  // namespace

TEST_CASE("window: every rank puts into every other, sizes differ", "[window]") {
  for (const int n : {1, 2, 3, 4}) {
    for (const std::size_t part : {std::size_t{1}, std::size_t{1000}, std::size_t{70001}}) {
      WindowRanks ranks(n);
      require_no_errors(run_ranks(n, [&](int rank) {
        const auto extra = static_cast<std::size_t>(rank);
        const WindowTensor mine = ranks.tensor(rank, part * static_cast<std::size_t>(n) + extra);
        const auto window = ranks.make(rank, mine);
        for (int target = 0; target < n; ++target) {
          const Words words = pattern_of(rank, target, part);
          window->put(target, static_cast<std::int64_t>(part) * rank, bytes_of(words), part);
        }
        for (int source = 0; source < n; ++source) {
          window->wait_signal(source, patient_context());
          const std::byte* at =
              mine.data + part * static_cast<std::size_t>(source) * sizeof(std::uint32_t);
          expect(holds(at, pattern_of(source, rank, part)), "wrong words from ", source);
          expect(window->access()->part(source).count ==
                     part * static_cast<std::size_t>(n) + static_cast<std::size_t>(source),
                 "wrong size");
        }
        ranks.barrier(rank);
      }));
    }
  }
}

TEST_CASE("window: ping-pong, and signals that pile up", "[window]") {
  WindowRanks ranks(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    const WindowTensor mine = ranks.tensor(rank, 64);
    const auto window = ranks.make(rank, mine);
    for (std::uint32_t round = 0; round < 2000; ++round) {
      const Words words(1 + round % 64, round);
      if (rank == 0) {
        window->put(1, 0, bytes_of(words), words.size());
        window->wait_signal(1, patient_context());
      } else {
        window->wait_signal(0, patient_context());
        expect(holds(mine.data, words), "round ", round);
        window->signal(0);
      }
    }
    if (rank == 0) {
      for (int i = 0; i < 500; ++i) {
        window->signal(1);
      }
    } else {
      for (int i = 0; i < 500; ++i) {
        window->wait_signal(0, patient_context());
      }
      const auto error = error_of([&] { window->wait_signal(0, {soon(), nullptr}); });
      expect(threw<TimeoutError>(error), "a signal too many");
    }
    ranks.barrier(rank);
  }));
}

TEST_CASE("window: a mismatch fails on all ranks, lends nothing, and the next one works",
          "[window]") {
  WindowRanks ranks(3);
  std::vector<std::byte> outside(4096);
  const auto attempt = [&](const std::string& words, auto&& change) {
    const Errors errors = run_ranks(3, [&](int rank) {
      WindowTensor mine = ranks.tensor(rank, 100);
      std::byte* const block = mine.data;
      const auto free_block = [&] { ranks.arena(rank).free(block); };
      try {
        OpKind kind = OpKind::kNewWindow;
        std::uint64_t number = 0;
        if (rank == 1) {
          change(mine, kind, number);
        }
        if (pattern(kind) == Pattern::kNone) {
          ranks.barrier(rank);
        } else {
          ranks.make(rank, mine, kind, number);
        }
      } catch (...) {
        free_block();
        throw;
      }
      free_block();
    });
    require_all_threw<MismatchError>(errors);
    INFO(text_of(errors[0]));
    REQUIRE(contains(text_of(errors[0]), words));
    REQUIRE(text_of(errors[0]) == text_of(errors[2]));
    for (int rank = 0; rank < 3; ++rank) {
      REQUIRE(ranks.lent(rank).n_lent() == 0);
      REQUIRE(ranks.arena(rank).statistics().used_bytes == 0);
    }
  };
  attempt("the dtype differs", [](WindowTensor& mine, OpKind&, std::uint64_t&) {
    mine.dtype = DType::kInt32;
    mine.type_code = 3;
  });
  attempt("rank 1 called barrier()",
          [](WindowTensor&, OpKind& kind, std::uint64_t&) { kind = OpKind::kBarrier; });
  attempt("rank 1 called window.tensor_register",
          [](WindowTensor&, OpKind& kind, std::uint64_t&) { kind = OpKind::kWindowRegister; });
  attempt("does not lie in the arena. Allocate it with horon.empty",
          [&](WindowTensor& mine, OpKind&, std::uint64_t&) { mine.data = outside.data(); });
  require_no_errors(run_ranks(3, [&](int rank) {
    const auto window = ranks.make(rank, ranks.tensor(rank, 10));
    window->signal((rank + 1) % 3);
    window->wait_signal((rank + 2) % 3, patient_context());
    ranks.barrier(rank);
  }));
}

TEST_CASE("window: ranks that register different windows are told", "[window]") {
  WindowRanks ranks(2);
  const Errors errors = run_ranks(2, [&](int rank) {
    ranks.make(rank, ranks.tensor(rank, 10), OpKind::kWindowRegister,
               static_cast<std::uint64_t>(rank));
  });
  require_all_threw<MismatchError>(errors);
  REQUIRE(contains(text_of(errors[0]), "the window differs"));
}

TEST_CASE("window: what a put refuses", "[window]") {
  WindowRanks ranks(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    const WindowTensor mine = ranks.tensor(rank, rank == 0 ? 10 : 20);
    const auto window = ranks.make(rank, mine);
    const Words words(20, 7);
    const auto refuses = [&](int target, std::int64_t offset, std::uint64_t count,
                             const std::byte* data, const char* text) {
      const auto error = error_of([&] { window->put(target, offset, data, count); });
      expect(threw<UsageError>(error) && contains(text_of(error), text), text_of(error));
    };
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    refuses(0, 0, 11, bytes_of(words), "window of 10 elements");
    refuses(1, 1, 20, bytes_of(words), "window of 20 elements");
    refuses(1, -1, 1, bytes_of(words), "offset -1");
    refuses(0, 11, 0, bytes_of(words), "window of 10");
    refuses(0, kMost, 1, bytes_of(words), "window of 10");
    refuses(2, 0, 1, bytes_of(words), "rank 2 is not a rank of this group of 2");
    refuses(-1, 0, 1, bytes_of(words), "rank -1");
    refuses(rank, 1, 3, mine.data, "overlaps");
    refuses(1 - rank, 0, 3, window->access()->data(1 - rank) + 4, "overlaps");
    ranks.barrier(rank);
    expect(holds(mine.data, Words(mine.count, 0)), "a refused put wrote something");
    // Parts of one tensor that do not overlap are fine, and so is nothing at all.
    window->put(rank, 0, mine.data + 20, 5);
    window->put(1 - rank, 0, nullptr, 0);
    window->wait_signal(rank, patient_context());
    window->wait_signal(1 - rank, patient_context());
    ranks.barrier(rank);
  }));
}

TEST_CASE("window: signals are taken in the order in which they were asked for", "[window]") {
  SignalWords words{};
  const Peers peers;
  IncomingSignals incoming(&words, &peers);
  REQUIRE_FALSE(incoming.take_now());
  const auto first = incoming.expect();
  const auto second = incoming.expect();
  raise_signal(words);
  REQUIRE_FALSE(incoming.take_now());  // somebody was first
  REQUIRE(incoming.look_for(*first));
  REQUIRE_FALSE(incoming.look_for(*second));
  const auto third = incoming.expect();
  REQUIRE(incoming.forget(*second));
  raise_signal(words);
  REQUIRE(incoming.look_for(*third));
  REQUIRE_FALSE(incoming.look_for(*second));
  REQUIRE_FALSE(incoming.forget(*third));
  raise_signal(words);
  REQUIRE(incoming.take_now());
  REQUIRE_FALSE(incoming.take_now());
  incoming.give_back(*third);
  REQUIRE(incoming.take_now());
  const auto fourth = incoming.expect();
  incoming.give_back(*fourth);
  raise_signal(words);
  REQUIRE(incoming.take_now());
}

TEST_CASE("window: a wait that times out names the rank and takes nothing", "[window]") {
  WindowRanks ranks(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto window = ranks.make(rank, ranks.tensor(rank, 10));
    if (rank == 0) {
      const auto error = error_of([&] { window->wait_signal(1, {soon(), nullptr}); });
      expect(threw<TimeoutError>(error) && contains(text_of(error), "Timed out waiting 150ms") &&
                 contains(text_of(error), "rank 1"),
             text_of(error));
    }
    ranks.barrier(rank);
    window->signal(1 - rank);
    window->wait_signal(1 - rank, patient_context());
    ranks.barrier(rank);
  }));
}

TEST_CASE("window: the end of a peer ends the wait for it", "[window]") {
  enum class End { kDeath, kDeparture, kPoison };
  for (const End end : {End::kDeath, End::kDeparture, End::kPoison}) {
    WindowRanks ranks(3);
    ranks.group->make_mortal();
    require_no_errors(run_ranks(3, [&](int rank) {
      const auto window = ranks.make(rank, ranks.tensor(rank, 10));
      ranks.barrier(rank);
      if (rank == 1) {
        window->signal(0);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        switch (end) {
          case End::kDeath:
            ranks.group->kill(1);
            break;
          case End::kDeparture:
            ranks.transport(1).depart();
            break;
          case End::kPoison:
            ranks.transport(1).abort("a reason");
            break;
        }
        return;
      }
      if (rank == 0) {
        window->wait_signal(1, patient_context());  // raised before
      }
      const auto error = error_of([&] { window->wait_signal(1, patient_context()); });
      const bool is_as_expected =
          end == End::kPoison ? threw<GroupError>(error) : threw<PeerLostError>(error);
      expect(is_as_expected && contains(text_of(error), "rank 1"), text_of(error));
      const Words word(1, 5);
      const auto put = error_of([&] { window->put(1, rank, bytes_of(word), 1); });
      expect(end == End::kDeath ? !put : threw<GroupError>(put), "put: ", text_of(put));
      if (end != End::kPoison) {  // the others go on
        window->signal(2 - rank);
        window->wait_signal(2 - rank, patient_context());
      }
    }));
  }
}

TEST_CASE("window: an interrupted wait leaves the signal", "[window]") {
  WindowRanks ranks(1);
  const auto window = ranks.make(0, ranks.tensor(0, 1));
  struct Interrupted {};
  const std::function<void()> interrupt = [] { throw Interrupted(); };
  REQUIRE_THROWS_AS(window->wait_signal(0, {patient(), &interrupt}), Interrupted);
  window->signal(0);
  window->wait_signal(0, patient_context());
}

TEST_CASE("window: after this rank has left, its windows say so", "[window]") {
  WindowRanks ranks(1);
  const auto window = ranks.make(0, ranks.tensor(0, 1));
  ranks.transport(0).depart();
  for (const auto& error : {error_of([&] { window->signal(0); }),
                            error_of([&] { window->wait_signal(0, patient_context()); })}) {
    REQUIRE(threw<GroupError>(error));
    REQUIRE(contains(text_of(error), "destroyed the process group"));
  }
}

TEST_CASE("window: memory is lent until all have let go", "[window]") {
  if (kHasThreadSanitizer) {
    return;  // the ranks share an arena there
  }
  WindowRanks ranks(2);
  std::vector<std::unique_ptr<Window>> windows(2);
  std::vector<WindowTensor> tensors(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    tensors[r] = ranks.tensor(rank, 20000);
    windows[r] = ranks.make(rank, tensors[r]);
  }));
  const auto used = [&](int rank) { return ranks.arena(rank).statistics().used_bytes; };
  ranks.arena(0).free(tensors[0].data);  // the tensor goes first
  REQUIRE(used(0) >= 80000);
  ranks.lent(0).sweep();
  REQUIRE(used(0) >= 80000);
  std::shared_ptr<WindowAccess> mapped = windows[1]->access();  // as a mapped tensor has it
  windows[0].reset();
  ranks.lent(0).sweep();
  REQUIRE(used(0) >= 80000);
  windows[1].reset();
  ranks.lent(0).sweep();
  REQUIRE(used(0) >= 80000);
  REQUIRE(mapped->data(0) != nullptr);
  mapped.reset();
  REQUIRE(used(0) >= 80000);  // nobody has looked
  ranks.lent(0).sweep();
  REQUIRE(used(0) == 0);
  REQUIRE(ranks.lent(0).n_lent() == 0);
  REQUIRE(ranks.lent(1).n_lent() == 0);  // it was the last to let go of its own
  ranks.arena(1).free(tensors[1].data);
  REQUIRE(used(1) == 0);
}

TEST_CASE("window: who has died has let go", "[window]") {
  if (kHasThreadSanitizer) {
    return;
  }
  WindowRanks ranks(2);
  ranks.group->make_mortal();
  std::vector<std::unique_ptr<Window>> windows(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    windows[static_cast<std::size_t>(rank)] = ranks.make(rank, ranks.tensor(rank, 100));
  }));
  windows[0].reset();
  REQUIRE(ranks.lent(0).n_lent() == 1);
  ranks.group->kill(1);
  ranks.lent(0).sweep();
  REQUIRE(ranks.lent(0).n_lent() == 0);
  REQUIRE(ranks.lent(1).n_lent() == 1);  // it lives, in truth
}

TEST_CASE("window: outlives the group", "[window]") {
  auto ranks = std::make_unique<WindowRanks>(2);
  std::shared_ptr<WindowAccess> kept;
  require_no_errors(run_ranks(2, [&](int rank) {
    const WindowTensor mine = ranks->tensor(rank, 1000);
    const Words words = pattern_of(rank, 0, 1000);
    std::memcpy(mine.data, words.data(), 4000);
    const auto window = ranks->make(rank, mine);
    if (rank == 0) {
      kept = window->access();
    }
    ranks->barrier(rank);
  }));
  ranks.reset();
  REQUIRE(holds(kept->data(1), pattern_of(1, 0, 1000)));
  REQUIRE(holds(kept->data(0), pattern_of(0, 0, 1000)));
}

TEST_CASE("window: a forked child gets errors, and lets go of nothing", "[window]") {
  if (kHasThreadSanitizer) {
    return;  // it does not follow forks of a process that has threads
  }
  WindowRanks ranks(1);
  auto window = ranks.make(0, ranks.tensor(0, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    const auto error = error_of([&] { window->signal(0); });
    const auto wait = error_of([&] { window->wait_signal(0, patient_context()); });
    window.reset();
    ::_exit(threw<UsageError>(error) && threw<UsageError>(wait) ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(status == 0);
  REQUIRE(ranks.lent(0).n_lent() == 1);
  window->signal(0);
  window->wait_signal(0, patient_context());
  window.reset();
  REQUIRE(ranks.lent(0).n_lent() == 0);
}

TEST_CASE("window: several threads put and wait", "[window]") {
  WindowRanks ranks(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    constexpr int kThreads = 3;
    constexpr int kRounds = 200;
    const WindowTensor mine = ranks.tensor(rank, 3 * 5000);
    const auto window = ranks.make(rank, mine);
    const Errors errors = run_ranks(kThreads, [&](int thread) {
      const Words words = pattern_of(rank, thread, 5000);
      for (int round = 0; round < kRounds; ++round) {
        window->put(1 - rank, thread * 5000, bytes_of(words), words.size());
        window->wait_signal(1 - rank, patient_context());
      }
    });
    for (const auto& error : errors) {
      expect(!error, text_of(error));
    }
    ranks.barrier(rank);
    for (int thread = 0; thread < kThreads; ++thread) {
      expect(holds(mine.data + thread * 20000, pattern_of(1 - rank, thread, 5000)), "thread");
    }
    ranks.barrier(rank);
  }));
}
