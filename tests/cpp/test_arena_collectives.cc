#include "shm/arena_collectives.h"

#include <cstring>
#include <map>

#include "catch.h"
#include "shm/shm_transport.h"
#include "transport_suite.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kArenaBytes = std::size_t{16} << 20;

std::vector<ArenaAccess> make_arenas(int n_ranks) {
  std::vector<ArenaAccess> access(static_cast<std::size_t>(n_ranks));
  for (ArenaAccess& mine : access) {
    mine.own = std::make_shared<Arena>(kArenaBytes);
    mine.mapped = std::make_shared<PeerArenas>();
  }
  return access;
}

// Whether a rank uses its arena in its i-th call.
using Chooser = bool (*)(int rank, std::uint64_t call);

bool always(int, std::uint64_t) { return true; }
bool sometimes(int rank, std::uint64_t call) {
  return (static_cast<std::uint64_t>(rank) + call / 3) % 4 != 0;
}

// Runs calls on tensors in the arena: copies the inputs there, one after another, and the results
// back to where the caller wants them. Offsets differ between ranks and calls.
class ArenaTensors final : public Transport {
 public:
  ArenaTensors(Segment* segment, const Peers* peers, const GroupArenas* arenas, Arena* arena,
               Chooser uses_arena)
      : inner_(segment, peers, arenas),
        arena_(arena),
        rank_(peers->rank),
        uses_arena_(uses_arena) {}

  void run(const Request& request, const WaitContext& context) override {
    const std::uint64_t call = calls_++;
    if (!uses_arena_(rank_, call)) {
      inner_.run(request, context);
      return;
    }
    Request moved = request;
    std::size_t total = 0;
    std::map<const std::byte*, std::size_t> places;  // of inputs, from the beginning
    for (const ConstSpan& input : request.inputs) {
      if (input.bytes > 0 && places.emplace(input.data, total).second) {
        total += input.bytes;
      }
    }
    if (total == 0) {
      inner_.run(request, context);
      return;
    }
    const std::size_t skew = (call + static_cast<std::uint64_t>(rank_)) % 7 * request.element_bytes;
    std::byte* const block = arena_->allocate(total + skew);
    std::byte* const base = block + skew;
    for (ConstSpan& input : moved.inputs) {
      if (input.bytes > 0) {
        std::byte* to = base + places[input.data];
        std::memcpy(to, input.data, input.bytes);
        input.data = to;
      }
    }
    const bool in_place_only = pattern(request.kind) == Pattern::kReduceToAll ||
                               pattern(request.kind) == Pattern::kReduceToRoot;
    for (Span& output : moved.outputs) {
      const auto place = places.find(output.data);
      if (output.bytes > 0 && (in_place_only || place != places.end())) {
        output.data = base + (in_place_only ? 0 : place->second);
      }
    }
    const std::vector<std::byte> before(base, base + total);
    try {
      inner_.run(moved, context);
    } catch (const MismatchError&) {
      expect(std::memcmp(base, before.data(), total) == 0, "a mismatch changed the tensor");
      arena_->free(block);
      throw;
    } catch (...) {
      arena_->free(block);
      throw;
    }
    for (std::size_t i = 0; i < request.outputs.size(); ++i) {
      if (request.outputs[i].bytes > 0 && request.outputs[i].data != moved.outputs[i].data) {
        std::memcpy(request.outputs[i].data, moved.outputs[i].data, request.outputs[i].bytes);
      }
    }
    arena_->free(block);
  }
  void abort(const std::string& reason) override { inner_.abort(reason); }
  void depart() override { inner_.depart(); }

 private:
  ShmTransport inner_;
  Arena* const arena_;
  const int rank_;
  const Chooser uses_arena_;
  std::uint64_t calls_ = 0;
};

struct Shared {
  std::vector<ArenaAccess> access;
  std::unique_ptr<LocalGroup> group;
};

template <Chooser uses_arena>
Transports make_with_arena(int n_ranks) {
  auto shared = std::make_shared<Shared>();
  shared->access = make_arenas(n_ranks);
  shared->group = std::make_unique<LocalGroup>(n_ranks, small_options(), shared->access);
  Transports transports;
  for (int rank = 0; rank < n_ranks; ++rank) {
    transports.by_rank.push_back(std::make_unique<ArenaTensors>(
        shared->group->segment(rank), shared->group->peers(rank), shared->group->arenas(rank),
        shared->access[static_cast<std::size_t>(rank)].own.get(), uses_arena));
  }
  transports.shared = std::move(shared);
  return transports;
}

// One rank's in-place all_reduce of ones in its arena.
struct Ones {
  Ones(Arena& arena, std::uint64_t count)
      : data(reinterpret_cast<float*>(arena.allocate(count * sizeof(float)))) {
    std::fill_n(data, count, 1.0F);
    request.kind = OpKind::kAllReduce;
    request.element_bytes = sizeof(float);
    request.count = count;
    const Span span{reinterpret_cast<std::byte*>(data), count * sizeof(float)};
    request.inputs = {{span.data, span.bytes}};
    request.outputs = {span};
  }
  float* data;
  Request request;
};

}  // namespace

// The thread sanitizer sees two addresses for the same memory, and so no order between them: these
// tests are about results.
TEST_CASE("arena: all kinds, dtypes and sizes") { test_all_kinds(make_with_arena<always>); }
TEST_CASE("arena: all dtypes and ops") { test_all_ops(make_with_arena<always>); }
TEST_CASE("arena: a mismatch fails one call and the next works") {
  test_mixed_with_mismatches(make_with_arena<always>);
}
TEST_CASE("arena: only some ranks use it") { test_all_kinds(make_with_arena<sometimes>); }
TEST_CASE("arena: only some ranks use it, with mismatches") {
  test_mixed_with_mismatches(make_with_arena<sometimes>);
}
TEST_CASE("arena: factors of each rank") { test_premul_factors(make_with_arena<always>); }
TEST_CASE("arena: abort") { test_abort(make_with_arena<always>); }
TEST_CASE("arena: timeout") { test_timeout(make_with_arena<always>); }
TEST_CASE("arena: interrupt") { test_interrupt(make_with_arena<always>); }

TEST_CASE("arena: sizes around every block and slice") {
  for (const int n : {2, 3}) {
    const Transports transports = make_with_arena<always>(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      for (std::uint64_t count = 2040 * static_cast<std::uint64_t>(n);
           count < 2060 * static_cast<std::uint64_t>(n); ++count) {
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)],
                      all_reduce_plan(n, count), rank);
      }
    }));
  }
}

TEST_CASE("arena: tensors that are together larger than the caches") {
  for (const int n : {2, 3}) {
    const Transports transports = make_with_arena<always>(n);
    require_no_errors(run_ranks(n, [&](int rank) {
      const std::uint64_t least =
          (std::uint64_t{24} << 20) / sizeof(float) / static_cast<std::uint64_t>(n);
      for (const std::uint64_t more : {0, 1, 17, 262144, 262147}) {
        run_and_check(*transports.by_rank[static_cast<std::size_t>(rank)],
                      all_reduce_plan(n, least + more), rank);
      }
    }));
  }
}

TEST_CASE("arena: nothing goes through the buffers") {
  constexpr int kRanks = 3;
  const std::vector<ArenaAccess> access = make_arenas(kRanks);
  const LocalGroup group(kRanks, small_options(), access);
  const auto fill = [&](std::byte value) {
    for (int rank = 0; rank < kRanks; ++rank) {
      std::memset(group.segment(rank)->data(rank), static_cast<int>(value), 4096);
    }
  };
  const auto buffers_hold = [&](std::byte value) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::byte* ring = group.segment(rank)->data(rank);
      if (!std::all_of(ring, ring + 4096, [&](std::byte b) { return b == value; })) {
        return false;
      }
    }
    return true;
  };
  fill(std::byte{0x77});
  require_no_errors(run_ranks(kRanks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    ArenaTensors transport(group.segment(rank), group.peers(rank), group.arenas(rank),
                           access[r].own.get(), always);
    for (const OpKind kind :
         {OpKind::kAllReduce, OpKind::kReduce, OpKind::kBroadcast, OpKind::kAllGather,
          OpKind::kAllGatherSingle, OpKind::kGather, OpKind::kScatter, OpKind::kReduceScatterSingle,
          OpKind::kAllToAllSingle}) {
      Plan plan = all_reduce_plan(kRanks, 3000);
      plan.kind = kind;
      run_and_check(transport, plan, rank);
    }
  }));
  REQUIRE(buffers_hold(std::byte{0x77}));
}

TEST_CASE("arena: a rank that has none, or sees none, and the others") {
  constexpr int kRanks = 3;
  for (const bool sees : {true, false}) {
    std::vector<ArenaAccess> access = make_arenas(kRanks);
    access[1].own = nullptr;
    if (!sees) {
      access[1].mapped = nullptr;
    }
    const LocalGroup group(kRanks, small_options(), access);
    REQUIRE(group.arenas(1)->is_usable() == sees);
    require_no_errors(run_ranks(kRanks, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      ArenaTensors transport(group.segment(rank), group.peers(rank), group.arenas(rank),
                             access[r].own.get(),
                             rank == 1 ? [](int, std::uint64_t) { return false; } : &always);
      for (const Plan& plan : plans_for(kRanks)) {
        run_and_check(transport, plan, rank);
      }
    }));
  }
}

TEST_CASE("arena: two groups share the mappings") {
  const std::vector<ArenaAccess> access = make_arenas(2);
  const LocalGroup first(2, small_options(), access);
  const LocalGroup second(2, small_options(), access);
  const std::uint64_t offset = 64;
  REQUIRE(first.arenas(0)->at(1, offset, 64) == second.arenas(0)->at(1, offset, 64));
  REQUIRE(first.arenas(0)->at(0, offset, 64) == access[0].own->data() + offset);
  REQUIRE(threw<Error>(error_of([&] { first.arenas(0)->at(1, kArenaBytes, 1); })));
  REQUIRE(threw<Error>(error_of([&] { first.arenas(0)->at(1, ~std::uint64_t{7}, 64); })));
}

TEST_CASE("arena: ranks that share one arena, as threads of a process do") {
  ArenaAccess shared{std::make_shared<Arena>(kArenaBytes), std::make_shared<PeerArenas>(), {}};
  const LocalGroup group(3, small_options(), {shared, shared, shared});
  require_no_errors(run_ranks(3, [&](int rank) {
    ArenaTensors transport(group.segment(rank), group.peers(rank), group.arenas(rank),
                           shared.own.get(), always);
    for (const Plan& plan : plans_for(3)) {
      run_and_check(transport, plan, rank);
    }
  }));
}

TEST_CASE("arena: the tensors of an operation that failed are quarantined") {
  const std::vector<ArenaAccess> access = make_arenas(2);
  const LocalGroup group(2, small_options(), access);
  const Errors errors = run_ranks(2, [&](int rank) {
    Arena& arena = *access[static_cast<std::size_t>(rank)].own;
    ShmTransport transport(group.segment(rank), group.peers(rank), group.arenas(rank));
    Ones call(arena, 10000);
    transport.run(call.request, patient_context());
    expect(call.data[0] == 2.0F && call.data[9999] == 2.0F, "wrong sum");
    Ones small(arena, 10);  // inline: nobody touches it
    if (rank == 0) {
      transport.run(call.request, {soon(), nullptr});
    }
  });
  REQUIRE(threw<GroupError>(errors[0]));
  REQUIRE_FALSE(errors[1]);
  REQUIRE(access[0].own->statistics().quarantined_bytes == 40960);
  REQUIRE(access[1].own->statistics().quarantined_bytes == 0);
}

TEST_CASE("arena: operations that are left to the others, with leads of any size") {
  const auto lead_of = [](std::uint32_t call, int rank) {
    return (call * 7919 + static_cast<std::uint32_t>(rank) * 65537) % 400000;
  };
  for (const int n : {1, 2, 3}) {
    const std::vector<ArenaAccess> access = make_arenas(n);
    const LocalGroup group(n, small_options(), access);
    require_no_errors(run_ranks(n, [&](int rank) {
      Arena& arena = *access[static_cast<std::size_t>(rank)].own;
      ShmTransport transport(group.segment(rank), group.peers(rank), group.arenas(rank));
      for (std::uint32_t call = 0; call < 60; ++call) {
        Ones ones(arena, 100 + 30011 * (call % 7));
        ones.request.lead_bytes = lead_of(call, rank);
        const bool stays = (call + static_cast<std::uint32_t>(rank)) % 3 == 0;
        if (stays) {
          transport.run(ones.request, patient_context());
        } else {
          const auto [is_left, common_lead] =
              transport.run_and_leave(ones.request, patient_context());
          std::uint32_t least = lead_of(call, 0);
          for (int peer = 1; peer < n; ++peer) {
            least = std::min(least, lead_of(call, peer));
          }
          const bool claims =
              group.peers(rank)->claims;  // more ranks than cores: leads mean nothing
          expect(common_lead == (claims ? 0 : least), "another common lead");
          if (is_left) {
            transport.await_left(patient_context());
            expect(transport.has_left_ended(), "not ended after the wait");
          }
        }
        for (std::uint64_t i = 0; i < ones.request.count; ++i) {
          expect(ones.data[i] == static_cast<float>(n), "wrong sum");
        }
        arena.free(reinterpret_cast<std::byte*>(ones.data));
      }
    }));
  }
}

TEST_CASE("arena: what was left to a rank that never does its part is quarantined") {
  for (const bool waits : {true, false}) {
    const std::vector<ArenaAccess> access = make_arenas(2);
    LocalGroup group(2, small_options(), access);
    group.set_cores(LocalGroup::Cores::kOneEach);
    ShmTransport leaves(group.segment(0), group.peers(0), group.arenas(0));
    ShmTransport comes(group.segment(1), group.peers(1), group.arenas(1));
    Ones own(*access[0].own, 10000);
    Ones others(*access[1].own, 10000);
    comes.meet(others.request, Transport::kMeetingPatience);  // and goes no further
    REQUIRE(leaves.run_and_leave(own.request, patient_context()).is_left);
    REQUIRE_FALSE(leaves.has_left_ended());
    if (waits) {
      comes.abort("enough");
      const auto error = error_of([&] { leaves.await_left(patient_context()); });
      REQUIRE(threw<GroupError>(error));
      REQUIRE(contains(text_of(error), "enough"));
      REQUIRE(contains(text_of(error), "#0 on rank 0"));  // not of what would come next
    }
    leaves.let_go_left();  // the engine calls it in either case
    REQUIRE(access[0].own->statistics().quarantined_bytes == 40960);
    leaves.let_go_left();
    REQUIRE(access[0].own->statistics().quarantined_bytes == 40960);
  }
}

TEST_CASE("arena: the tensors of an operation that was met for and let go are quarantined") {
  const std::vector<ArenaAccess> access = make_arenas(2);
  LocalGroup group(2, small_options(), access);
  for (const LocalGroup::Cores cores : {LocalGroup::Cores::kTwoEach, LocalGroup::Cores::kOneEach}) {
    group.set_cores(cores);
    ShmTransport transport(group.segment(0), group.peers(0), group.arenas(0));
    Ones call(*access[0].own, 10000);
    REQUIRE_FALSE(transport.meet(call.request, Transport::kMeetingPatience));
    transport.let_go(call.request);
    const bool has_arrived = cores == LocalGroup::Cores::kOneEach;
    REQUIRE(access[0].own->statistics().quarantined_bytes == (has_arrived ? 40960 : 0));
  }
}

TEST_CASE("arena: a small operation that failed quarantines nothing") {
  const std::vector<ArenaAccess> access = make_arenas(2);
  const LocalGroup group(2, small_options(), access);
  ShmTransport transport(group.segment(0), group.peers(0), group.arenas(0));
  Ones call(*access[0].own, 10);
  REQUIRE(threw<GroupError>(error_of([&] { transport.run(call.request, {soon(), nullptr}); })));
  REQUIRE(access[0].own->statistics().quarantined_bytes == 0);
}

TEST_CASE("arena: what a rank says about where its data lies") {
  const std::vector<ArenaAccess> access = make_arenas(1);
  const LocalGroup group(1, small_options(), access);
  const GroupArenas& arenas = *group.arenas(0);
  Arena& arena = *access[0].own;
  std::byte* base = arena.allocate(4096);
  Request request;
  request.kind = OpKind::kAllToAllSingle;
  request.element_bytes = 1;
  const auto offset = [&](PerRank<ConstSpan> inputs, PerRank<Span> outputs) {
    request.inputs = std::move(inputs);
    request.outputs = std::move(outputs);
    return arena_offset_of(request, arenas, 0);
  };
  std::byte elsewhere[100];
  const std::uint64_t at = arena.offset_of(base);
  const Span out0{elsewhere, 10};
  const Span out1{elsewhere + 10, 10};
  REQUIRE(offset({{base, 10}, {base + 10, 10}}, {out0, out1}) == at);
  REQUIRE(offset({{nullptr, 0}, {base + 10, 10}}, {out0, out1}) == at + 10);
  REQUIRE(offset({{base, 10}, {base + 11, 10}}, {out0, out1}) == kNotInArena);
  REQUIRE(offset({{base + 10, 10}, {base, 10}}, {out0, out1}) == kNotInArena);
  REQUIRE(offset({{base, 10}, {elsewhere + 50, 10}}, {out0, out1}) == kNotInArena);
  REQUIRE(offset({{elsewhere, 10}, {elsewhere + 10, 10}}, {out0, out1}) == kNotInArena);
  REQUIRE(offset({{nullptr, 0}, {nullptr, 0}}, {out0, out1}) == kNotInArena);
  // In place is fine for the own part only.
  REQUIRE(offset({{base, 10}, {base + 10, 10}}, {{base, 10}, out1}) == at);
  REQUIRE(offset({{base, 10}, {base + 10, 10}}, {out0, {base + 10, 10}}) == kNotInArena);
  REQUIRE(offset({{base, 10}, {base + 10, 10}}, {{base + 5, 10}, out1}) == kNotInArena);
  request.kind = OpKind::kAllReduce;
  REQUIRE(offset({{base, 10}}, {{base, 10}}) == at);
  REQUIRE(offset({{base, 10}}, {out0}) == kNotInArena);
  request.refusal = "no";
  REQUIRE(offset({{base, 10}}, {{base, 10}}) == kNotInArena);
  REQUIRE(arena_offset_of(request, GroupArenas(), 0) == kSeesNoArenas);
}
