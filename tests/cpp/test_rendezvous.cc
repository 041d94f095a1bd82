#include "shm/rendezvous.h"

#include <atomic>
#include <latch>

#include "catch.h"
#include "core/cpu_budget.h"
#include "rank_threads.h"
#include "shm/liveness.h"

using namespace horon;
using namespace horon::testing;

namespace {

using Groups = std::vector<std::unique_ptr<SharedGroup>>;

// Everybody writes a word and reads the others' after all have written.
void check_shared(const Groups& groups) {
  const int n = static_cast<int>(groups.size());
  for (int rank = 0; rank < n; ++rank) {
    groups[static_cast<std::size_t>(rank)]->segment.words(rank).counter(Counter::kStep).value =
        static_cast<std::uint32_t>(rank + 10);
  }
  for (const auto& group : groups) {
    for (int rank = 0; rank < n; ++rank) {
      REQUIRE(group->segment.words(rank).counter(Counter::kStep).value ==
              static_cast<std::uint32_t>(rank + 10));
      const Peer& peer = group->peers.peers[static_cast<std::size_t>(rank)];
      REQUIRE(peer.pid == ::getpid());
      REQUIRE(peer.liveness_fd);
      REQUIRE_FALSE(has_ended(peer.liveness_fd.get()));
    }
  }
}

// The view of a rank that stops after it has said that it is there (member), or before it says that
// it has joined, until `resume` lets it go on.
class StoppingStore final : public Store {
 public:
  StoppingStore(Store& store, std::string where, std::latch& resume)
      : store_(store), where_(std::move(where)), resume_(resume) {}

  void set(const std::string& key, const std::string& value) override {
    const bool stops = contains(key, where_ + "/");
    if (stops && where_ == "joined") {
      resume_.wait();
    }
    store_.set(key, value);
    if (stops && where_ == "member") {
      resume_.wait();
    }
  }

  std::string get(const std::string& key, const Deadline& deadline) override {
    return store_.get(key, deadline);
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_.add(key, amount);
  }

 private:
  Store& store_;
  const std::string where_;
  std::latch& resume_;
};

// Whether it names that rank, and no other, as the one that was waited for.
bool blames_only(const std::exception_ptr& error, int blamed, int n_ranks) {
  const std::string text = text_of(error);
  const std::string wait = text.substr(std::min(text.find("Timed out waiting"), text.size()));
  for (int rank = 0; rank < n_ranks; ++rank) {
    if (contains(wait, concat("rank ", rank, " (pid ")) != (rank == blamed)) {
      return false;
    }
  }
  return true;
}

struct Stop {
  int rank;
  std::string where;                // see StoppingStore
  std::vector<Deadline> deadlines;  // by rank
};

struct StopOutcome {
  Errors errors;                         // by rank
  std::chrono::nanoseconds took_more{};  // the stopped one than the last of the others
};

// The stopped rank goes on when the others have given up.
StopOutcome stop_a_rank(const Stop& stop) {
  const int n = static_cast<int>(stop.deadlines.size());
  MemoryStore store;
  std::latch resume(n - 1);
  std::atomic<Clock::rep> last_end{0};  // of those that were not stopped
  StoppingStore stopping(store, stop.where, resume);
  StopOutcome outcome;
  outcome.errors = run_ranks(n, [&](int rank) {
    const Deadline& deadline = stop.deadlines[static_cast<std::size_t>(rank)];
    if (rank == stop.rank) {
      rendezvous(stopping, identity_of(rank, n), small_options(), deadline);
      return;
    }
    const auto error =
        error_of([&] { rendezvous(store, identity_of(rank, n), small_options(), deadline); });
    last_end = Clock::now().time_since_epoch().count();
    resume.count_down();
    if (error) {
      std::rethrow_exception(error);
    }
  });
  outcome.took_more = Clock::now().time_since_epoch() - Clock::duration(last_end);
  return outcome;
}

// Everybody says the same, whoever is stopped.
void check_that_stopped_ranks_are_named(const std::vector<Stop>& stops) {
  const std::vector<StopOutcome> outcomes = at_once(static_cast<int>(stops.size()), [&](int i) {
    return stop_a_rank(stops[static_cast<std::size_t>(i)]);
  });
  for (std::size_t i = 0; i < stops.size(); ++i) {
    const int stopped = stops[i].rank;
    CAPTURE(stopped, stops[i].where);
    const int n = static_cast<int>(stops[i].deadlines.size());
    REQUIRE(outcomes[i].took_more < std::chrono::seconds(5));  // nobody waits for who has gone
    for (int rank = 0; rank < n; ++rank) {
      const std::exception_ptr& error = outcomes[i].errors[static_cast<std::size_t>(rank)];
      INFO("rank " << rank << ": " << text_of(error));
      REQUIRE(threw<GroupError>(error));
      REQUIRE(blames_only(error, stopped, n));
      if (rank == stopped) {
        REQUIRE(threw<PeerLostError>(error));
        REQUIRE(contains(text_of(error), "has given up"));
      }
    }
  }
}

}  // namespace

TEST_CASE("ranks meet, twice with the same store") {
  for (int n = 1; n <= 5; ++n) {
    MemoryStore store;
    Groups first(static_cast<std::size_t>(n));
    Groups second(static_cast<std::size_t>(n));
    const Errors errors = run_ranks(n, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      first[r] = rendezvous(store, identity_of(rank, n), small_options(), patient());
      second[r] = rendezvous(store, identity_of(rank, n), small_options(), patient());
      expect(first[r] && second[r], "no group");
      expect(first[r]->peers.rank == rank, "wrong rank");
      expect(first[r]->peers.n_ranks() == n, "wrong number of ranks");
      expect(first[r]->segment.layout().n_ranks() == n, "wrong layout");
    });
    require_no_errors(errors);
    check_shared(first);
    for (const auto& group : second) {
      REQUIRE(group->segment.words(0).counter(Counter::kStep).value ==
              0);  // not the first group's memory
    }
    check_shared(second);
  }
}

TEST_CASE("waits know of a crowd whatever claiming is set to") {
  const CpuBudget own = own_cpu_budget();
  for (const int n : {1, 2, 3, 9}) {
    for (const std::string claiming : {"auto", "on", "off"}) {
      CAPTURE(n, claiming);
      MemoryStore store;
      Groups groups(static_cast<std::size_t>(n));
      require_no_errors(run_ranks(n, [&](int rank) {
        Options options = small_options();
        options.claiming = claiming;
        groups[static_cast<std::size_t>(rank)] =
            rendezvous(store, identity_of(rank, n), options, patient());
      }));
      const bool is_crowded =
          n > common_cpus(std::vector<CpuBudget>(static_cast<std::size_t>(n), own));
      for (const auto& group : groups) {
        CHECK(group->peers.is_crowded == is_crowded);
        CHECK(group->peers.claims == (claiming == "auto" ? is_crowded : claiming == "on"));
        CHECK(group->peers.may_move);
        CHECK((group->peers.linger_time.count() == 0) == is_crowded);
      }
    }
  }
}

TEST_CASE("different settings are a UsageError on every rank, and the next group works") {
  MemoryStore store;
  const Errors errors = run_ranks(3, [&](int rank) {
    Options options = small_options();
    options.buffer_bytes = rank == 1 ? 8192 : 4096;
    rendezvous(store, identity_of(rank, 3), options, patient());
  });
  require_all_threw<UsageError>(errors);
  for (const std::exception_ptr& error : errors) {
    INFO(text_of(error));
    REQUIRE(contains(text_of(error), "rank 1 "));
    REQUIRE(contains(text_of(error), "buffer=4096"));
    REQUIRE(contains(text_of(error), "buffer=8192"));
  }
  Groups groups(3);
  require_no_errors(run_ranks(3, [&](int rank) {
    groups[static_cast<std::size_t>(rank)] =
        rendezvous(store, identity_of(rank, 3), small_options(), patient());
    expect(groups[static_cast<std::size_t>(rank)] != nullptr, "no group");
  }));
  check_shared(groups);
}

TEST_CASE("ranks that disagree about their number are told at once, whoever never comes") {
  MemoryStore store;
  const Errors errors = run_ranks(2, [&](int rank) {
    rendezvous(store, identity_of(rank, rank == 0 ? 2 : 3), small_options(), patient());
  });
  require_all_threw<UsageError>(errors);
  for (const std::exception_ptr& error : errors) {
    INFO(text_of(error));
    REQUIRE(contains(text_of(error), "rank 0 has 2 ranks, rank 1 has 3"));
    REQUIRE(contains(text_of(error), "WORLD_SIZE"));
  }
}

TEST_CASE("all ranks that have not come are named, not the first alone") {
  MemoryStore store;
  const Errors errors = run_ranks(4, [&](int rank) {
    if (rank == 0 || rank == 2) {
      rendezvous(store, identity_of(rank, 4), small_options(), after_the_others_came());
    }
  });
  for (const int rank : {0, 2}) {
    const std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
    INFO("rank " << rank << ": " << text_of(error));
    REQUIRE(threw<TimeoutError>(error));
    REQUIRE(contains(text_of(error), "for ranks 1 and 3 to join"));
  }
}

TEST_CASE("a timeout says as which rank another process has come, on whatever host") {
  MemoryStore store;
  const Errors errors = run_ranks(4, [&](int rank) {
    if (rank == 0 || rank == 1) {
      rendezvous(store, identity_of(rank, 3), small_options(), after_the_others_came());
    } else if (rank == 3) {  // in the place of rank 2
      (void)store.get("horon/1/member/1", patient());
      store.add("horon/generation/1", 1);
    }
  });
  for (const int rank : {0, 1}) {
    const std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
    INFO("rank " << rank << ": " << text_of(error));
    REQUIRE(threw<TimeoutError>(error));
    REQUIRE(contains(text_of(error), "for rank 2 to join"));
    REQUIRE(contains(text_of(error), "Another process has come as rank 1, too"));
  }
}

TEST_CASE("the roll is called: all have come, and the number of the start is the same for all") {
  MemoryStore store;
  for (const std::int64_t start : {1, 2}) {
    const Errors errors = run_ranks(3, [&](int rank) {
      const std::int64_t found = call_roll(store, identity_of(rank, 3), small_options(), patient());
      expect(found == start, "start ", found);
    });
    require_no_errors(errors);
  }
  const Errors errors = run_ranks(2, [&](int rank) {
    (void)call_roll(store, identity_of(rank, 3), small_options(), after_the_others_came());
  });
  for (const std::exception_ptr& error : errors) {
    REQUIRE(threw<TimeoutError>(error));
    REQUIRE(contains(text_of(error), "for rank 2 to join"));
  }
}

TEST_CASE("a missing rank is named by everybody who waits for it") {
  const std::vector<Errors> errors_by_missing = at_once(3, [](int missing) {
    MemoryStore store;
    return run_ranks(3, [&](int rank) {
      if (rank != missing) {
        rendezvous(store, identity_of(rank, 3), small_options(), after_the_others_came());
      }
    });
  });
  for (int missing = 0; missing < 3; ++missing) {
    const Errors& errors = errors_by_missing[static_cast<std::size_t>(missing)];
    for (int rank = 0; rank < 3; ++rank) {
      const std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
      INFO("missing " << missing << ", rank " << rank << ": " << text_of(error));
      REQUIRE(threw<TimeoutError>(error) == (rank != missing));
      if (rank != missing) {
        REQUIRE(contains(text_of(error), concat("for rank ", missing, " to join")));
      }
    }
  }
}

TEST_CASE("a rank that comes when the others have given up does not wait for them") {
  std::vector<MemoryStore> stores(3);  // by the rank that is late
  at_once(3, [&](int late) {
    return run_ranks(3, [&](int rank) {
      if (rank != late) {
        rendezvous(stores[static_cast<std::size_t>(late)], identity_of(rank, 3), small_options(),
                   after_the_others_came());
      }
    });
  });
  for (int late = 0; late < 3; ++late) {
    MemoryStore& store = stores[static_cast<std::size_t>(late)];
    const Clock::time_point begin = Clock::now();
    const std::exception_ptr error =
        error_of([&] { rendezvous(store, identity_of(late, 3), small_options(), patient()); });
    INFO("late " << late << ": " << text_of(error));
    REQUIRE(Clock::now() - begin < std::chrono::seconds(10));
    REQUIRE(threw<PeerLostError>(error));
    REQUIRE(contains(text_of(error), " has given up"));  // whoever was first
    REQUIRE(contains(text_of(error), concat("for rank ", late, " to join")));
    // The next attempt is another one.
    Groups groups(3);
    require_no_errors(run_ranks(3, [&](int rank) {
      groups[static_cast<std::size_t>(rank)] =
          rendezvous(store, identity_of(rank, 3), small_options(), patient());
    }));
    check_shared(groups);
  }
}

TEST_CASE(
    "a rank of another host that comes when the others have given up does not wait for them") {
  std::vector<MemoryStore> stores(3);  // by the rank that is late
  const auto meet = [&](int late, int rank, const Deadline& deadline) {
    Options options = small_options();
    options.host_id = rank == 2 ? "there" : "here";
    return rendezvous(stores[static_cast<std::size_t>(late)], identity_of(rank, 3), options,
                      deadline);
  };
  at_once(3, [&](int late) {
    return run_ranks(3, [&](int rank) {
      if (rank != late) {
        meet(late, rank, after_the_others_came());
      }
    });
  });
  for (int late = 0; late < 3; ++late) {
    const std::exception_ptr error = error_of([&] { meet(late, late, patient()); });
    INFO("late " << late << ": " << text_of(error));
    REQUIRE(threw<PeerLostError>(error));
    REQUIRE(contains(text_of(error), " has given up"));  // whoever was first
    require_no_errors(
        run_ranks(3, [&](int rank) { expect(meet(late, rank, patient()) == nullptr, "a group"); }));
  }
}

TEST_CASE("a rank that stops after it has said that it is there is named by all, itself included") {
  std::vector<Stop> stops;
  for (const int stopped : {0, 1, 3}) {
    stops.push_back({stopped, "member", std::vector(4, after_the_others_came())});
  }
  check_that_stopped_ranks_are_named(stops);
}

TEST_CASE("a rank that stops before it has joined is named by all, itself included") {
  std::vector<Stop> stops;
  for (const int stopped : {0, 2}) {
    stops.push_back({stopped, "joined", std::vector(3, after_the_others_came())});
  }
  check_that_stopped_ranks_are_named(stops);
}

TEST_CASE("a rank whose time is over first learns from rank 0 whom it waits for") {
  const Deadline early = after_the_others_came();
  check_that_stopped_ranks_are_named({{3, "member", {patient(), early, patient(), patient()}},
                                      {1, "member", {patient(), patient(), patient(), early}}});
}

TEST_CASE("another host means no group for anybody") {
  for (int n = 2; n <= 4; ++n) {
    MemoryStore store;
    const Errors errors = run_ranks(n, [&](int rank) {
      Options options = small_options();
      options.host_id = rank == n - 1 ? "there" : "here";
      expect(rendezvous(store, identity_of(rank, n), options, patient()) == nullptr, "a group");
    });
    require_no_errors(errors);
  }
}

TEST_CASE("a damaged record is an error that shows it") {
  MemoryStore store;
  store.set("horon/1/member/1", "nonsense");
  const std::exception_ptr error =
      error_of([&] { rendezvous(store, identity_of(0, 2), small_options(), patient()); });
  REQUIRE(threw<Error>(error));
  REQUIRE(contains(text_of(error), "nonsense"));
}

TEST_CASE("peers are described with pid, and with the global rank where it differs") {
  Peers peers;
  peers.peers.resize(2);
  peers.peers[0].pid = 11;
  peers.peers[1].pid = 22;
  peers.global_ranks = {0, 5};
  REQUIRE(peers.describe(0) == "rank 0 (pid 11)");
  REQUIRE(peers.describe(1) == "rank 1 (global rank 5, pid 22)");
}
