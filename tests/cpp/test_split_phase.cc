// Operations over shared memory that are started long before they are completed, mixed with others.

#include <deque>
#include <memory>
#include <optional>
#include <random>

#include "catch.h"
#include "shm/shm_transport.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

// The transports of n ranks over rings of a few operations.
struct Group {
  Group(int n_ranks, const std::string& claiming, std::size_t deposit_bytes = 4096)
      : local(n_ranks, options(claiming, deposit_bytes)) {
    local.set_cores(LocalGroup::Cores::kOneEach);
    for (int rank = 0; rank < n_ranks; ++rank) {
      transports.push_back(std::make_unique<ShmTransport>(local.segment(rank), local.peers(rank)));
    }
  }
  static Options options(const std::string& claiming, std::size_t deposit_bytes) {
    Options options = small_options();
    options.claiming = claiming;
    options.deposit_bytes = deposit_bytes;
    return options;
  }
  ShmTransport& operator[](int rank) { return *transports[static_cast<std::size_t>(rank)]; }

  LocalGroup local;
  std::vector<std::unique_ptr<ShmTransport>> transports;
};

// What a lane does with a transport: starts what it can, completes in order, meets for some of the
// rest, and runs it.
class Issuer {
 public:
  explicit Issuer(Transport& transport) : transport_(transport) {}

  std::size_t n_started() const { return started_.size(); }

  // `mismatch`: what differs on another rank, if anything. `may_start`: or run it in any case.
  void issue(const Plan& plan, int rank, const std::optional<std::string>& mismatch, bool may_start,
             bool may_meet = false) {
    auto call = std::make_unique<Issued>(plan, rank, mismatch);
    if (may_start && transport_.start(call->call.request)) {
      started_.push_back(std::move(call));
      return;
    }
    complete_all();
    if (may_meet) {
      transport_.meet(call->call.request, Transport::kMeetingPatience);
    }
    finish(*call, [&](const Request& request) { transport_.run(request, patient_context()); });
  }

  void complete_first() {
    const auto call = std::move(started_.front());
    started_.pop_front();
    finish(*call, [&](const Request& request) { transport_.complete(request, patient_context()); });
  }

  void complete_ready() {
    while (!started_.empty() && transport_.is_ready()) {
      complete_first();
    }
  }

  void complete_all() {
    while (!started_.empty()) {
      complete_first();
    }
  }

 private:
  struct Issued {
    Issued(const Plan& plan, int rank, const std::optional<std::string>& differs)
        : call(plan, rank), mismatch(differs) {}
    RankCall call;
    const std::optional<std::string> mismatch;
  };

  template <typename Execute>
  static void finish(const Issued& issued, const Execute& execute) {
    const std::exception_ptr error = error_of([&] { execute(issued.call.request); });
    if (issued.mismatch) {
      expect(threw<MismatchError>(error), issued.call.describe(), " with another ",
             *issued.mismatch, " elsewhere threw '", text_of(error), "'");
      const std::string problem = issued.call.check_untouched();
      expect(problem.empty(), issued.call.describe(), ": ", problem);
      return;
    }
    expect(!error, issued.call.describe(), " threw ", text_of(error));
    const std::string problem = issued.call.check_result();
    expect(problem.empty(), issued.call.describe(), ": ", problem);
  }

  Transport& transport_;
  std::deque<std::unique_ptr<Issued>> started_;
};

Plan random_plan(std::mt19937& random, int n_ranks, unsigned seed) {
  // Twice as many small as large ones, and the kinds that can be started more often.
  constexpr std::uint64_t kCounts[] = {0, 1, 7, 32, 64, 16, 65, 1500, 4000};
  constexpr OpKind kStartable[] = {OpKind::kAllReduce,       OpKind::kBroadcast,
                                   OpKind::kBarrier,         OpKind::kReduce,
                                   OpKind::kAllGatherSingle, OpKind::kReduceScatterSingle};
  Plan plan;
  plan.kind = random() % 4 != 0 ? kStartable[random() % std::size(kStartable)]
                                : all_kinds()[random() % all_kinds().size()];
  plan.dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kInt64;
  plan.op = has_reduction(plan.kind) ? op_for(plan.dtype, static_cast<int>(random() % 5))
                                     : ReduceOp::kSum;
  plan.n_ranks = n_ranks;
  plan.root = static_cast<int>(random() % static_cast<unsigned>(n_ranks));
  plan.count = kCounts[random() % std::size(kCounts)];
  plan.is_in_place = random() % 2 == 0;
  plan.seed = seed;
  return plan;
}

void run_mix(const std::string& claiming, bool with_mismatches) {
  const unsigned n_operations = kHasThreadSanitizer ? 150 : 1200;
  for (int n = 1; n <= 4; ++n) {
    Group group(n, claiming);
    require_no_errors(run_ranks(n, [&](int rank) {
      std::mt19937 common(static_cast<unsigned>(n));         // what: the same on every rank
      std::mt19937 own(static_cast<unsigned>(1000 + rank));  // when: each rank as it likes
      Issuer issuer(group[rank]);
      std::size_t most = 0;
      for (unsigned i = 0; i < n_operations; ++i) {
        Plan plan = random_plan(common, n, i);
        std::optional<std::string> mismatch;
        if (with_mismatches && n > 1 && common() % 8 == 0) {
          Plan spoilt = plan;
          mismatch = spoil(spoilt, common);
          const int culprit = static_cast<int>(common() % static_cast<unsigned>(n));
          plan = rank == culprit ? spoilt : plan;
        }
        issuer.issue(plan, rank, mismatch, own() % 8 != 0, own() % 2 != 0);
        most = std::max(most, issuer.n_started());
        switch (own() % 10) {
          case 0:
            issuer.complete_all();
            break;
          case 1:
          case 2:
            issuer.complete_ready();
            break;
          case 3:
            std::this_thread::yield();
            break;
          default:
            break;
        }
      }
      issuer.complete_all();
      // How many depends on when the others come; one at a time would not be what is tested here.
      expect(most >= 2, "never more than ", most, " were under way");
    }));
  }
}

Plan all_reduce_of(int n_ranks, std::uint64_t count, unsigned seed = 0) {
  Plan plan;
  plan.kind = OpKind::kAllReduce;
  plan.n_ranks = n_ranks;
  plan.count = count;
  plan.seed = seed;
  return plan;
}

}  // namespace

TEST_CASE("shm: started and run operations in any mixture") { run_mix("off", false); }
TEST_CASE("shm: started and run operations in any mixture, claiming") { run_mix("on", false); }
TEST_CASE("shm: started and run operations, with mismatches") { run_mix("off", true); }
TEST_CASE("shm: started and run operations, with mismatches, claiming") { run_mix("on", true); }

TEST_CASE("shm: ranks that come together meet, and run what they met for") {
  for (const bool has_spare_cores : {false, true}) {
    Group group(2, "off");
    group.local.set_cores(has_spare_cores ? LocalGroup::Cores::kTwoEach
                                          : LocalGroup::Cores::kOneEach);
    const std::uint64_t longest = group.local.segment(0)->layout().inline_bytes() / sizeof(float);
    RankCall small(all_reduce_of(2, longest), 0);
    REQUIRE_FALSE(
        group[0].meet(small.request, Transport::kMeetingPatience));  // nobody has to wait for that
    RankCall first(all_reduce_of(2, 4000), 0);
    RankCall second(all_reduce_of(2, 4000), 1);
    REQUIRE_FALSE(
        group[0].meet(first.request, Transport::kMeetingPatience));  // the other one is late
    // Met, by whom nobody waits for any more.
    REQUIRE(group[1].meet(second.request, Transport::kMeetingPatience) == !has_spare_cores);
    require_no_errors(run_ranks(2, [&](int rank) {
      group[rank].run((rank == 0 ? first : second).request, patient_context());
    }));
    REQUIRE(first.check_result() == "");
    REQUIRE(second.check_result() == "");
  }
}

TEST_CASE("shm: who waited in vain some times does not meet, but for every eighth") {
  Group group(2, "off");
  std::vector<int> met;
  for (int i = 1; i <= 17; ++i) {
    RankCall first(all_reduce_of(2, 4000), 0);
    RankCall second(all_reduce_of(2, 4000), 1);
    REQUIRE_FALSE(group[0].meet(first.request, Transport::kMeetingPatience));
    if (group[1].meet(second.request,
                      Transport::kMeetingPatience)) {  // if the first one has arrived
      met.push_back(i);
    }
    require_no_errors(run_ranks(2, [&](int rank) {
      group[rank].run((rank == 0 ? first : second).request, patient_context());
    }));
    REQUIRE(first.check_result() == "");
  }
  REQUIRE(met == std::vector<int>{1, 2, 3, 4, 8, 16});
}

TEST_CASE("shm: a rank that dies after it has arrived, and one that nobody comes to") {
  Group group(2, "off");
  group.local.make_mortal();
  RankCall first(all_reduce_of(2, 4000), 0);
  REQUIRE_FALSE(group[0].meet(first.request, Transport::kMeetingPatience));
  group.local.kill(1);
  const std::exception_ptr error =
      error_of([&] { group[0].run(first.request, patient_context()); });
  INFO(text_of(error));
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #0"));
  REQUIRE(contains(text_of(error), "rank 1"));
  REQUIRE(first.check_untouched() == "");
  REQUIRE_FALSE(group[0].meet(first.request, Transport::kMeetingPatience));  // the group has ended
}

TEST_CASE("shm: what reads the result of a started operation is not started before its end") {
  Group group(2, "off");
  require_no_errors(run_ranks(2, [&](int rank) {
    ShmTransport& transport = group[rank];
    for (int round = 0; round < 50; ++round) {
      std::vector<float> tensor(20, 1.0F);
      std::vector<float> other(20, 1.0F);
      const auto in_place = [](std::vector<float>& values, std::size_t begin, std::size_t count) {
        Request request;
        request.kind = OpKind::kAllReduce;
        request.type_code = static_cast<std::uint8_t>(DType::kFloat32);
        request.element_bytes = 4;
        request.count = count;
        auto* data = reinterpret_cast<std::byte*>(values.data() + begin);
        request.inputs = {ConstSpan{data, 4 * count}};
        request.outputs = {Span{data, 4 * count}};
        return request;
      };
      const Request whole = in_place(tensor, 0, 20);
      const Request part = in_place(tensor, 19, 1);
      const Request apart = in_place(other, 0, 20);
      expect(transport.start(whole), "not started");
      expect(transport.start(apart), "something else was not started");
      expect(!transport.start(whole), "started twice on the same memory");
      expect(!transport.start(part), "started on a part of it");
      transport.complete(whole, patient_context());
      expect(transport.start(part), "not started after the end");
      transport.complete(apart, patient_context());
      transport.complete(part, patient_context());
      expect(tensor[0] == 2.0F && tensor[18] == 2.0F && tensor[19] == 4.0F && other[19] == 2.0F,
             "wrong results");
    }
  }));
}

TEST_CASE("shm: ready when all have come, or when somebody has ended the group") {
  Group group(2, "off");
  RankCall first(all_reduce_of(2, 5), 0);
  RankCall second(all_reduce_of(2, 5), 1);
  RankCall later(all_reduce_of(2, 6), 0);
  REQUIRE(group[0].start(first.request));
  REQUIRE_FALSE(group[0].is_ready());
  REQUIRE(group[1].start(second.request));
  REQUIRE(group[0].is_ready());
  REQUIRE(group[0].start(later.request));
  group[0].complete(first.request, patient_context());
  REQUIRE(first.check_result() == "");
  REQUIRE_FALSE(group[0].is_ready());
  group[1].complete(second.request, patient_context());
  group[1].abort("enough of this");
  REQUIRE(group[0].is_ready());
  REQUIRE_THROWS_AS(group[0].complete(later.request, patient_context()), GroupError);
  REQUIRE(later.check_untouched() == "");
  REQUIRE_FALSE(group[0].start(later.request));  // the group has ended
}

TEST_CASE("shm: a started operation without the others is an error at its deadline") {
  Group group(3, "off");
  RankCall first(all_reduce_of(3, 5), 0);
  RankCall second(all_reduce_of(3, 5), 0);
  RankCall of_other(all_reduce_of(3, 5), 2);
  REQUIRE(group[0].start(first.request));
  REQUIRE(group[0].start(second.request));
  REQUIRE(group[2].start(of_other.request));
  const std::exception_ptr error =
      error_of([&] { group[0].complete(first.request, WaitContext{soon(), nullptr}); });
  INFO(text_of(error));
  REQUIRE(threw<GroupError>(error));
  REQUIRE(contains(text_of(error), "all_reduce #0"));
  REQUIRE(contains(text_of(error), "150ms for rank 1"));
  REQUIRE_THROWS_AS(group[0].complete(second.request, patient_context()), GroupError);
  REQUIRE_THROWS_AS(group[2].complete(of_other.request, patient_context()), GroupError);
  REQUIRE(first.check_untouched() == "");
}

TEST_CASE("shm: who leaves after starting and completing its part fails nobody") {
  for (const bool aborts : {false, true}) {
    Group group(2, "off");
    RankCall first(all_reduce_of(2, 5), 0);
    RankCall second(all_reduce_of(2, 5), 1);
    REQUIRE(group[0].start(first.request));
    REQUIRE(group[1].start(second.request));
    group[1].complete(second.request, patient_context());
    aborts ? group[1].abort("no more") : group[1].depart();
    group[0].complete(first.request, patient_context());
    REQUIRE(first.check_result() == "");
    REQUIRE(second.check_result() == "");
  }
}

TEST_CASE("shm: what all ranks have issued needs nothing more from one that does not wait") {
  // Broadcasts from rank 0 take much of its ring and little of the other's; different histories put
  // the rings' ends at different operations.
  for (const std::size_t before : {0, 1, 5, 9}) {
    Group group(2, "off");
    std::vector<std::unique_ptr<RankCall>> calls;
    Issuer root(group[0]);
    Issuer leaf(group[1]);
    for (std::size_t i = 0; i < before; ++i) {
      Plan plan = all_reduce_of(2, 1);
      plan.kind = OpKind::kScatter;
      plan.count = 60;
      require_no_errors(run_ranks(
          2, [&](int rank) { (rank == 0 ? root : leaf).issue(plan, rank, std::nullopt, false); }));
    }
    for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllReduce}) {
      // The leaf starts as many as it can, and then has something else to do.
      Plan plan = all_reduce_of(2, 64);
      plan.kind = kind;
      unsigned n_started = 0;
      while (true) {
        calls.push_back(std::make_unique<RankCall>(plan, 1));
        if (!group[1].start(calls.back()->request)) {
          calls.pop_back();
          break;
        }
        ++n_started;
      }
      REQUIRE(n_started >= 2);
      INFO(name(kind) << ", " << n_started << " started, after " << before << " scatters");
      const auto soon_enough = [] {
        return WaitContext{Deadline::after(std::chrono::seconds(2)), nullptr};
      };
      for (unsigned i = 0; i < n_started; ++i) {
        RankCall call(plan, 0);
        group[0].run(call.request, soon_enough());
        REQUIRE(call.check_result() == "");
      }
      for (unsigned i = 0; i < n_started; ++i) {
        group[1].complete(calls[i]->request, patient_context());
        REQUIRE(calls[i]->check_result() == "");
      }
      calls.clear();
    }
  }
}
