#include "core/header.h"

#include <functional>
#include <set>

#include "catch.h"
#include "core/published_stream.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr int kKindCount = 17;

// Well-formed requests without data; the slots are written and read as transports do it.
struct Arrivals {
  std::vector<Request> requests;
  std::vector<std::vector<std::uint64_t>> slots;  // words, for alignment
  std::vector<HeaderView> views;

  explicit Arrivals(std::vector<Request> all, const std::vector<std::uint64_t>& sequences = {})
      : requests(std::move(all)) {
    const int n = static_cast<int>(requests.size());
    for (int rank = 0; rank < n; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      slots.emplace_back(header_bytes(n) / 8);
      auto* slot = reinterpret_cast<std::byte*>(slots.back().data());
      const std::uint64_t sequence = sequences.empty() ? 7 : sequences[r];
      write_header(slot, make_header(requests[r], sequence, rank, n), requests[r], n);
      views.push_back(read_header(slot, n));
    }
  }

  // "" when the headers agree.
  std::string mismatch() const { return find_mismatch(views).value_or(""); }
};

Request make_request(OpKind kind, int n, std::uint64_t count = 6) {
  static std::byte memory[4096];
  Request request;
  request.kind = kind;
  request.type_code = 6;
  request.element_bytes = 4;
  const Pattern moves = pattern(kind);
  if (moves == Pattern::kNone) {
    return request;
  }
  request.count = count;
  const auto ranks = static_cast<std::size_t>(n);
  const bool is_list = moves == Pattern::kExchange || moves == Pattern::kReduceScatter;
  request.inputs.assign(is_list ? ranks : 1, {memory, count * 4});
  request.outputs.assign(moves == Pattern::kExchange ? ranks : 1, {memory, count * 4});
  if (is_list) {
    request.send_counts.assign(ranks, count);
    request.recv_counts.assign(ranks, count);
  }
  return request;
}

std::vector<Request> make_requests(OpKind kind, int n) {
  return std::vector<Request>(static_cast<std::size_t>(n), make_request(kind, n));
}

}  // namespace

TEST_CASE("headers of the same call agree, whatever the kind") {
  for (int kind = 0; kind < kKindCount; ++kind) {
    for (int n = 1; n <= 5; ++n) {
      INFO(name(static_cast<OpKind>(kind)) << " on " << n << " ranks");
      REQUIRE(Arrivals(make_requests(static_cast<OpKind>(kind), n)).mismatch() == "");
    }
  }
}

TEST_CASE("every pair of different kinds is a mismatch that names both ranks and calls") {
  std::set<std::string> names;
  for (int a = 0; a < kKindCount; ++a) {
    names.insert(name(static_cast<OpKind>(a)));
    for (int b = 0; b < kKindCount; ++b) {
      if (a == b) {
        continue;
      }
      const auto first = static_cast<OpKind>(a);
      const auto second = static_cast<OpKind>(b);
      const std::string text =
          Arrivals({make_request(first, 2), make_request(second, 2)}).mismatch();
      INFO(text);
      REQUIRE(contains(text, concat(name(first), " #7")));
      REQUIRE(contains(text, concat("rank 0 called ", name(first), "(")));
      REQUIRE(contains(text, concat("rank 1 called ", name(second), "(")));
      REQUIRE(contains(text, "the group can still be used"));
    }
  }
  REQUIRE(names.size() == kKindCount);
  REQUIRE(names.count("unknown operation") == 0);
}

TEST_CASE("find_mismatch finds what one rank of three does differently") {
  struct Row {
    const char* what;
    OpKind kind;
    std::function<void(Request&)> change;
    std::vector<const char*> parts;  // of the text, for rank 1 being different
  };
  const std::vector<Row> rows = {
      {"dtype",
       OpKind::kAllReduce,
       [](Request& r) { r.dtype = DType::kInt64; },
       {"the dtype", "ranks 0 and 2 called all_reduce(float32", "rank 1 called all_reduce(int64"}},
      {"dtype of an exchange",
       OpKind::kAllGather,
       [](Request& r) { r.dtype = DType::kBFloat16; },
       {"the dtype", "(float32", "rank 1 called all_gather(bfloat16"}},
      {"opaque type", OpKind::kBroadcast, [](Request& r) { r.type_code = 24; }, {"the dtype"}},
      {"root",
       OpKind::kBroadcast,
       [](Request& r) { r.root = 2; },
       {"the root", "root 0", "rank 1 called broadcast(float32, 6 elements, root 2)"}},
      {"root of reduce",
       OpKind::kReduce,
       [](Request& r) { r.root = 1; },
       {"the root", "ranks 0 and 2", "rank 1 called reduce(float32, 6 elements, SUM, root 1)"}},
      {"op",
       OpKind::kAllReduce,
       [](Request& r) { r.op = ReduceOp::kMax; },
       {"the reduce op", "SUM", "rank 1 called all_reduce(float32, 6 elements, MAX)"}},
      {"op of reduce_scatter",
       OpKind::kReduceScatterSingle,
       [](Request& r) { r.op = ReduceOp::kAvg; },
       {"the reduce op", "SUM", "AVG"}},
      {"count",
       OpKind::kAllReduce,
       [](Request& r) { r.count = 1; },
       {"the number of elements", "6 elements", "rank 1 called all_reduce(float32, 1 element,"}},
      {"count of reduce",
       OpKind::kReduce,
       [](Request& r) { r.count = 5; },
       {"the number of elements", "6 elements", "5 elements"}},
      {"count of broadcast",
       OpKind::kBroadcast,
       [](Request& r) { r.count = 5; },
       {"the number of elements", "6 elements", "5 elements"}},
      {"digest",
       OpKind::kAllReduceCoalesced,
       [](Request& r) { r.batch_digest = 1; },
       {"the list of tensors", "all_reduce_coalesced"}},
      {"digest of a gather",
       OpKind::kAllGatherCoalesced,
       [](Request& r) { r.batch_digest = 1; },
       {"the list of tensors"}},
      {"refusal",
       OpKind::kAllToAll,
       [](Request& r) { r.refusal = "splits are wrong."; },
       {"all_to_all #7: rank 1 has invalid arguments: splits are wrong."}},
      {"refused barrier",
       OpKind::kBarrier,
       [](Request& r) { r.refusal = "no."; },
       {"barrier #7: rank 1 has invalid arguments: no."}},
  };
  for (const Row& row : rows) {
    std::vector<Request> requests = make_requests(row.kind, 3);
    row.change(requests[1]);
    const std::string text = Arrivals(requests).mismatch();
    INFO(row.what << ": " << text);
    REQUIRE(contains(text, concat(name(row.kind), " #7")));
    for (const char* part : row.parts) {
      INFO(part);
      REQUIRE(contains(text, part));
    }
    // The same difference on another rank is found as well.
    for (const std::size_t rank : {0, 2}) {
      requests = make_requests(row.kind, 3);
      row.change(requests[rank]);
      REQUIRE(Arrivals(requests).mismatch() != "");
    }
  }
}

TEST_CASE("what does not matter to a kind is not compared") {
  std::vector<Request> requests = make_requests(OpKind::kAllReduce, 2);
  requests[1].root = 1;
  requests[1].factor = 0.25;
  REQUIRE(Arrivals(requests).mismatch() == "");
  requests = make_requests(OpKind::kAllGather, 2);
  requests[1].op = ReduceOp::kMax;
  REQUIRE(Arrivals(requests).mismatch() == "");
  requests = make_requests(OpKind::kBarrier, 2);
  requests[1].dtype = DType::kInt8;
  requests[1].batch_digest = 3;
  REQUIRE(Arrivals(requests).mismatch() == "");
}

TEST_CASE("counts of exchanges and reduce_scatter agree pair by pair") {
  for (const OpKind kind :
       {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll,
        OpKind::kAllToAllSingle, OpKind::kReduceScatter, OpKind::kBroadcast}) {
    for (std::size_t source = 0; source < 3; ++source) {
      for (std::size_t destination = 0; destination < 3; ++destination) {
        std::vector<Request> requests = make_requests(kind, 3);
        requests[source].send_counts[destination] = 4;
        const std::string sent = Arrivals(requests).mismatch();
        INFO(sent);
        REQUIRE(contains(
            sent, concat("rank ", source, " sends 4 to rank ", destination, ", which expects 6")));
        requests[destination].recv_counts[source] = 4;  // now both know: uneven is fine
        REQUIRE(Arrivals(requests).mismatch() == "");
        requests[destination].recv_counts[source] = 9;
        REQUIRE(contains(Arrivals(requests).mismatch(), "which expects 9"));
      }
    }
  }
}

TEST_CASE("an op that the dtype can not do is an error with advice on every rank alike") {
  struct Row {
    DType dtype;
    ReduceOp op;
  };
  for (const Row& row :
       {Row{DType::kComplex64, ReduceOp::kMax}, Row{DType::kFloat32, ReduceOp::kBand},
        Row{DType::kOpaque, ReduceOp::kSum}}) {
    std::vector<Request> requests = make_requests(OpKind::kAllReduce, 2);
    for (Request& request : requests) {
      request.dtype = row.dtype;
      request.op = row.op;
    }
    const std::string text = Arrivals(requests).mismatch();
    INFO(text);
    REQUIRE(contains(text, "all_reduce #7: "));
    REQUIRE(text.size() > std::string("all_reduce #7: ").size());
  }
}

TEST_CASE("ranks that lost count of their calls are told") {
  const std::string text = Arrivals(make_requests(OpKind::kBarrier, 2), {4, 5}).mismatch();
  REQUIRE(contains(text, "the sequence number"));
}

TEST_CASE("a difference of kind is told before a refusal, and before anything reads counts") {
  std::vector<Request> requests = {make_request(OpKind::kAllToAll, 2),
                                   make_request(OpKind::kBarrier, 2)};
  requests[0].refusal = "x";
  REQUIRE(contains(Arrivals(requests).mismatch(), "rank 1 called barrier()"));
}

TEST_CASE("a header is read back as it was written") {
  for (int n = 1; n <= 40; n += 13) {
    Request request = make_request(OpKind::kAllToAll, n);
    request.dtype = DType::kComplex128;
    request.op = ReduceOp::kMin;
    request.type_code = 200;
    request.element_bytes = 16;
    request.root = 3;
    request.factor = -0.125;
    request.batch_digest = 0xfedcba9876543210;
    for (std::size_t peer = 0; peer < static_cast<std::size_t>(n); ++peer) {
      request.send_counts[peer] = 1000 + peer;
      request.recv_counts[peer] = 2000 + peer;
    }
    REQUIRE(header_bytes(n) % 64 == 0);
    std::vector<std::uint64_t> slot(header_bytes(n) / 8 + 1, 0x5a5a5a5a5a5a5a5a);
    auto* bytes = reinterpret_cast<std::byte*>(slot.data());
    write_header(bytes, make_header(request, 99, 0, n), request, n);
    REQUIRE(slot.back() == 0x5a5a5a5a5a5a5a5a);
    const HeaderView view = read_header(bytes, n);
    REQUIRE(view.header->sequence == 99);
    REQUIRE(view.header->kind == OpKind::kAllToAll);
    REQUIRE(view.header->dtype == DType::kComplex128);
    REQUIRE(view.header->op == ReduceOp::kMin);
    REQUIRE(view.header->type_code == 200);
    REQUIRE(view.header->element_bytes == 16);
    REQUIRE(view.header->root == 3);
    REQUIRE(view.header->count == 6);
    REQUIRE(view.header->factor == -0.125);
    REQUIRE(view.header->batch_digest == 0xfedcba9876543210);
    REQUIRE(view.header->published_bytes == published_bytes(request, 0, n));
    REQUIRE(view.header->has_counts == 1);
    REQUIRE(view.header->is_refused == 0);
    REQUIRE(std::equal(request.send_counts.begin(), request.send_counts.end(), view.send_counts));
    REQUIRE(std::equal(request.recv_counts.begin(), request.recv_counts.end(), view.recv_counts));
    REQUIRE(view.inline_data == bytes + header_bytes(*view.header, n));
  }
}

TEST_CASE("a refusal travels, cut where it is too long") {
  for (const std::size_t length : {1UL, kRefusalBytes - 1, kRefusalBytes, 5000UL}) {
    Request request = make_request(OpKind::kReduceScatter, 2);
    request.refusal = std::string(length, 'x');
    const Arrivals arrivals({request, make_request(OpKind::kReduceScatter, 2)});
    REQUIRE(arrivals.views[0].header->is_refused == 1);
    REQUIRE(arrivals.views[0].header->published_bytes == 0);
    const std::string read = arrivals.views[0].refusal;
    REQUIRE(read == request.refusal.substr(0, kRefusalBytes - 1));
  }
}

TEST_CASE("describe names everything that is compared") {
  const auto text = [](const Request& request) {
    return describe(Arrivals({request, request}).views[0], 2);
  };
  REQUIRE(text(make_request(OpKind::kBarrier, 2)) == "barrier()");
  REQUIRE(text(make_request(OpKind::kAllReduce, 2)) == "all_reduce(float32, 6 elements, SUM)");
  REQUIRE(text(make_request(OpKind::kReduce, 2, 1)) == "reduce(float32, 1 element, SUM, root 0)");
  REQUIRE(text(make_request(OpKind::kAllToAll, 2)) ==
          "all_to_all(float32, 6 elements, sends [6, 6])");
  Request opaque = make_request(OpKind::kBroadcast, 2);
  opaque.dtype = DType::kOpaque;
  REQUIRE(text(opaque) == "broadcast(opaque type 6, 6 elements, root 0)");
}
