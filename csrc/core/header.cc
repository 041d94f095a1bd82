#include "core/header.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/published_stream.h"
#include "core/rank_list.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

bool counts_travel(OpKind kind) {
  const Pattern moves = pattern(kind);
  return moves == Pattern::kExchange || moves == Pattern::kReduceScatter;
}

std::size_t counts_bytes(int n_ranks) {
  return 2 * static_cast<std::size_t>(n_ranks) * sizeof(std::uint64_t);
}

// "rank 0 called all_reduce(...); ranks 1 and 2 called barrier()".
std::string describe_all(const std::vector<HeaderView>& headers) {
  const int n_ranks = static_cast<int>(headers.size());
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (int rank = 0; rank < n_ranks; ++rank) {
    const std::string text = describe(headers[static_cast<std::size_t>(rank)], n_ranks);
    auto group = groups.begin();
    while (group != groups.end() && group->first != text) {
      ++group;
    }
    if (group == groups.end()) {
      groups.push_back({text, {rank}});
    } else {
      group->second.push_back(rank);
    }
  }
  std::string text;
  for (const auto& [call, ranks] : groups) {
    text += (text.empty() ? "" : "; ") + name_ranks(ranks) + " called " + call;
  }
  return text;
}

std::string mismatch_text(const std::vector<HeaderView>& headers, const std::string& what,
                          const std::string& advice) {
  return concat(name(headers[0].header->kind), " #", headers[0].header->sequence, ": ", what,
                " differs between ranks: ", describe_all(headers), ". ", advice,
                " Nothing was changed, and the group can still be used.");
}

std::optional<std::string> find_refusal(const std::vector<HeaderView>& headers) {
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    if (headers[rank].header->is_refused != 0) {
      return concat(name(headers[rank].header->kind), " #", headers[rank].header->sequence,
                    ": rank ", rank, " has invalid arguments: ", headers[rank].refusal);
    }
  }
  return std::nullopt;
}

// The usual case, decided fast: nothing that differs could differ rightly.
bool are_plainly_equal(const std::vector<HeaderView>& headers) {
  const Header& first = *headers[0].header;
  if (first.has_counts != 0 || first.is_refused != 0 ||
      (has_reduction(first.kind) && !is_reducible(first.dtype, first.op))) {
    return false;
  }
  for (std::size_t rank = 1; rank < headers.size(); ++rank) {
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): factors that differ in bits differ
    if (std::memcmp(&first, headers[rank].header, sizeof(Header)) != 0) {
      return false;
    }
  }
  return true;
}

std::optional<std::string> find_count_mismatch(const std::vector<HeaderView>& headers) {
  const int n_ranks = static_cast<int>(headers.size());
  for (int source = 0; source < n_ranks; ++source) {
    for (int destination = 0; destination < n_ranks; ++destination) {
      const std::uint64_t sent = headers[static_cast<std::size_t>(source)].send_counts[destination];
      const std::uint64_t expected =
          headers[static_cast<std::size_t>(destination)].recv_counts[source];
      if (sent != expected) {
        return mismatch_text(headers,
                             concat("the number of elements (rank ", source, " sends ", sent,
                                    " to rank ", destination, ", which expects ", expected, ")"),
                             "Give both sides tensors of the same size.");
      }
    }
  }
  return std::nullopt;
}

}  // namespace

Header make_header(const Request& request, std::uint64_t sequence, int rank, int n_ranks) {
  Header header;
  header.sequence = sequence;
  header.count = request.count;
  header.batch_digest = request.batch_digest;
  header.factor = request.factor;
  header.root = request.root;
  header.kind = request.kind;
  header.dtype = request.dtype;
  header.op = request.op;
  header.type_code = request.type_code;
  header.element_bytes = static_cast<std::uint8_t>(request.element_bytes);
  header.lead_bytes = request.lead_bytes;
  header.is_refused = request.refusal.empty() ? 0 : 1;
  if (header.is_refused == 0) {
    header.has_counts = counts_travel(request.kind) ? 1 : 0;
    header.published_bytes = published_bytes(request, rank, n_ranks);
  }
  return header;
}

std::string describe(const HeaderView& view, int n_ranks) {
  const Header& header = *view.header;
  std::ostringstream out;
  out << name(header.kind) << '(';
  // A sparse tensor's first request only brings its numbers; what it is, its own check tells.
  if (pattern(header.kind) != Pattern::kNone && header.kind != OpKind::kAllReduceSparse) {
    out << name(header.dtype);
    if (header.dtype == DType::kOpaque) {
      out << " type " << static_cast<int>(header.type_code);
    }
    out << ", " << header.count << (header.count == 1 ? " element" : " elements");
    if (header.has_counts != 0 && !has_shared_input(header.kind) && n_ranks <= 8) {
      out << ", sends [";
      for (int rank = 0; rank < n_ranks; ++rank) {
        out << (rank > 0 ? ", " : "") << view.send_counts[rank];
      }
      out << ']';
    }
    if (has_reduction(header.kind)) {
      out << ", " << name(header.op);
    }
    if (has_root(header.kind)) {
      out << ", root " << header.root;
    }
  }
  out << ')';
  return out.str();
}

std::string describe(const Request& request, int n_ranks) {
  const Header header = make_header(request, 0, 0, n_ranks);
  HeaderView view;
  view.header = &header;
  view.send_counts = request.send_counts.data();
  view.recv_counts = request.recv_counts.data();
  return describe(view, n_ranks);
}

std::string describe(const OperationName& operation) {
  const Request& request = *operation.request;
  return concat(name(request.kind), " #", operation.number, " on rank ", operation.rank, " (",
                describe(request, operation.n_ranks), ")");
}

std::optional<std::string> find_mismatch(const std::vector<HeaderView>& headers) {
  const Header& first = *headers[0].header;
  if (are_plainly_equal(headers)) {
    return std::nullopt;
  }
  const auto differs = [&](auto&& field) {
    for (const HeaderView& view : headers) {
      if (field(*view.header) != field(first)) {
        return true;
      }
    }
    return false;
  };
  if (differs([](const Header& h) { return h.kind; })) {
    return mismatch_text(headers, "the operation",
                         "Call the same operations in the same order on every rank.");
  }
  if (differs([](const Header& h) { return h.sequence; })) {
    return mismatch_text(headers, "the sequence number", "This is a bug in horon.");
  }
  if (auto refusal = find_refusal(headers)) {
    return refusal;
  }
  if (has_window(first.kind) && differs([](const Header& h) { return h.batch_digest; })) {
    return mismatch_text(headers, "the window",
                         "Register and deregister windows in the same order on every rank.");
  }
  const Pattern moves = pattern(first.kind);
  if (moves == Pattern::kNone) {
    return std::nullopt;
  }
  if (differs([](const Header& h) { return h.dtype; }) ||
      differs([](const Header& h) { return h.type_code; })) {
    return mismatch_text(headers, "the dtype", "Cast the tensors to one dtype first.");
  }
  if (has_root(first.kind) && differs([](const Header& h) { return h.root; })) {
    return mismatch_text(headers, "the root", "Name the same root on every rank.");
  }
  if (has_reduction(first.kind)) {
    if (differs([](const Header& h) { return h.op; })) {
      return mismatch_text(headers, "the reduce op", "Use the same op on every rank.");
    }
    if (!is_reducible(first.dtype, first.op)) {
      return concat(name(first.kind), " #", first.sequence, ": ",
                    why_not_reducible(first.dtype, first.op));
    }
  }
  if (differs([](const Header& h) { return h.batch_digest; })) {
    return mismatch_text(headers, "the list of tensors",
                         "Coalesce tensors of the same dtypes and sizes on every rank.");
  }
  const bool one_count = moves == Pattern::kReduceToAll || moves == Pattern::kReduceToRoot ||
                         first.kind == OpKind::kBroadcast;
  if (one_count && differs([](const Header& h) { return h.count; })) {
    return mismatch_text(headers, "the number of elements",
                         "Give every rank a tensor of the same size.");
  }
  return first.has_counts != 0 ? find_count_mismatch(headers) : std::nullopt;
}

std::size_t header_bytes(int n_ranks) {
  const std::size_t variable = counts_bytes(n_ranks);
  const std::size_t total = sizeof(Header) + (variable > kRefusalBytes ? variable : kRefusalBytes);
  return (total + 63) / 64 * 64;
}

std::size_t header_bytes(const Header& header, int n_ranks) {
  if (header.is_refused != 0) {
    return header_bytes(n_ranks);
  }
  return sizeof(Header) + (header.has_counts != 0 ? (counts_bytes(n_ranks) + 63) / 64 * 64 : 0);
}

void write_header(std::byte* at, const Header& header, const Request& request, int n_ranks) {
  std::memcpy(at, &header, sizeof(Header));
  std::byte* rest = at + sizeof(Header);
  if (header.is_refused != 0) {
    const std::size_t length = std::min(request.refusal.size(), kRefusalBytes - 1);
    std::memcpy(rest, request.refusal.data(), length);
    rest[length] = std::byte{0};
  } else if (header.has_counts != 0) {
    const std::size_t half = counts_bytes(n_ranks) / 2;
    std::memcpy(rest, request.send_counts.data(), half);
    std::memcpy(rest + half, request.recv_counts.data(), half);
  }
}

HeaderView read_header(const std::byte* at, int n_ranks) {
  HeaderView view;
  view.header = reinterpret_cast<const Header*>(at);
  const std::byte* rest = at + sizeof(Header);
  view.send_counts = reinterpret_cast<const std::uint64_t*>(rest);
  view.recv_counts = view.send_counts + n_ranks;
  view.refusal = reinterpret_cast<const char*>(rest);
  view.inline_data = at + header_bytes(*view.header, n_ranks);
  return view;
}

}  // namespace horon
