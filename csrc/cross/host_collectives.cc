#include "cross/host_collectives.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/monitored_barrier.h"
#include "core/rank_list.h"
#include "core/round_up.h"
#include "cross/sliced_reduction.h"
#include "reduce/convert_halves.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

// Where every rank has a copy of what columns, or columns of hosts, have: of so many at most.
constexpr std::uint64_t kMostCopiedBytes = std::uint64_t{32} << 20;
constexpr std::uint64_t kLeastPartBytes = 4096;
constexpr std::size_t kReasonBytes = 512;
// See Note [What other hosts hear].
constexpr std::chrono::seconds kPatience{5};

using Sizes = std::vector<std::uint64_t>;

WaitContext with_patience(WaitContext context, int times) {
  context.deadline = context.deadline.later(times * kPatience);
  return context;
}

// Of a call's last part, in which those who talk to other hosts are waited for.
HostCollectives::Call patient(const HostCollectives::Call& call) {
  return {call.operation, with_patience(call.context, 2)};
}

// In monitored_barrier rank 0 has less time than the others, and wants to hear within it who is
// missing elsewhere.
HostCollectives::Call until_rank_zero_wants_to_know(HostCollectives::Call call) {
  if (call.operation.request->kind == OpKind::kMonitoredBarrier && call.operation.rank != 0) {
    call.context.deadline = call.context.deadline.later(-kGraceForRankZero);
  }
  return call;
}

void copy_some(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

// Request fields of bytes that nobody looks into.
Request request_of_bytes(OpKind kind) {
  Request request;
  request.kind = kind;
  request.dtype = DType::kOpaque;
  request.type_code = static_cast<std::uint8_t>(DType::kOpaque);
  return request;
}

}  // namespace

HostCollectives::HostCollectives(Parts parts) : parts_(std::move(parts)) {}

std::uint64_t HostCollectives::part_bytes(std::size_t n_copies) const {
  return n_copies <= 1
             ? parts_.part_bytes
             : std::min(parts_.part_bytes, std::max(kLeastPartBytes, kMostCopiedBytes / n_copies));
}

void HostCollectives::abort(const std::string& reason) {
  if (parts_.column) {
    parts_.column->abort(reason);
  }
  if (parts_.local) {
    parts_.local->abort(reason);
  }
}

void HostCollectives::depart() {
  if (parts_.column) {
    parts_.column->depart();
  }
  if (parts_.local) {
    parts_.local->depart();
  }
}

void HostCollectives::run_locally(Request& request, const OperationName& whole,
                                  const WaitContext& context) const {
  request.whole = &whole;
  try {
    parts_.local->run(request, context);
  } catch (const MismatchError& error) {
    throw GroupError(concat("the ranks of one host disagree about a part of it, which is a bug in ",
                            "horon: ", error.what()));
  } catch (const EndedError& error) {
    if (!error.missing().empty()) {
      throw TimeoutError(error.reason(), error.missing());
    }
    throw GroupError(error.reason());
  }
}

Part HostCollectives::part_of_column(std::uint64_t count, std::size_t index) const {
  return index < parts_.layout.n_columns ? part_of(count, index, parts_.layout.n_columns)
                                         : Part{count, count};
}

Part HostCollectives::own_part(std::uint64_t count) const {
  return part_of_column(count, parts_.layout.own_index);
}

void HostCollectives::all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                                 const Call& call) {
  const HostLayout& layout = parts_.layout;
  std::size_t most = 0;  // ranks of a host
  for (const std::vector<int>& ranks : layout.hosts) {
    most = std::max(most, ranks.size());
  }
  // Of each host: the reason if there are no headers, which of its ranks are missing, the headers.
  const std::size_t flags_at = kReasonBytes;
  const std::size_t headers_at = round_up(flags_at + most, sizeof(std::uint64_t));
  const std::size_t block = headers_at + most * bytes;
  block_.assign(block, std::byte{0});
  blocks_.resize(block * layout.n_hosts());
  const bool is_first = layout.own_index == 0;
  copy_some(block_.data() + headers_at + layout.own_index * bytes, send, bytes);
  if (parts_.local) {
    std::vector<Part> parts;
    parts.reserve(n_neighbours());
    for (std::uint64_t each = 0; each < n_neighbours(); ++each) {
      parts.push_back({each * bytes, (each + 1) * bytes});
    }
    const auto tell = [&](const GroupError& error) {
      if (!is_first) {
        throw;
      }
      std::strncpy(reinterpret_cast<char*>(block_.data()), error.what(), kReasonBytes - 1);
    };
    try {
      // The first rank is to be the first whose time is over: it tells the other hosts.
      share_locally(block_.data() + headers_at, parts,
                    is_first ? until_rank_zero_wants_to_know(call) : patient(call));
    } catch (const TimeoutError& error) {
      tell(error);
      for (const int missing : error.missing()) {
        block_[flags_at + layout.index_of(missing)] = std::byte{1};
      }
    } catch (const GroupError& error) {
      tell(error);
    }
  }
  if (is_first) {
    // Reasons that come are not lost if other hosts' blocks do not come.
    for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
      std::memset(blocks_.data() + host * block, 0, headers_at);
    }
    try {
      parts_.column->all_gather(block_.data(), blocks_.data(), block,
                                with_patience(call.context, 1));
    } catch (const GroupError& error) {
      std::memcpy(blocks_.data() + layout.own_host * block, block_.data(), headers_at);
      if (const auto* late = dynamic_cast<const TimeoutError*>(&error)) {
        for (const int missing : late->missing()) {
          std::byte* const of_host =
              blocks_.data() + layout.host_of[static_cast<std::size_t>(missing)] * block;
          of_host[flags_at + layout.index_of(missing)] = std::byte{1};
        }
      }
      check_reasons(block, flags_at, error.what());
      throw;
    }
    check_reasons(block, flags_at);
  }
  if (parts_.local) {
    Request request = request_of_bytes(OpKind::kBroadcast);
    request.count = blocks_.size();
    for (std::size_t each = 0; each < n_neighbours(); ++each) {
      const bool is_sent = is_first && each != 0;
      const bool is_received = !is_first && each == 0;
      request.send_counts.push_back(is_sent ? blocks_.size() : 0);
      request.recv_counts.push_back(is_received ? blocks_.size() : 0);
      request.inputs.push_back(is_sent ? ConstSpan{blocks_.data(), blocks_.size()} : ConstSpan{});
      request.outputs.push_back(is_received ? Span{blocks_.data(), blocks_.size()} : Span{});
    }
    run_locally(request, call.operation, with_patience(call.context, 2));
  }
  for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
    for (std::size_t index = 0; index < layout.hosts[host].size(); ++index) {
      const auto rank = static_cast<std::size_t>(layout.hosts[host][index]);
      copy_some(receive + rank * bytes, blocks_.data() + host * block + headers_at + index * bytes,
                bytes);
    }
  }
}

void HostCollectives::check_reasons(std::size_t block, std::size_t flags_at,
                                    const std::string& own_reason) const {
  const HostLayout& layout = parts_.layout;
  std::string text = own_reason;
  std::vector<int> missing;
  for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
    const std::byte* const of_host = blocks_.data() + host * block;
    const auto* const reason = reinterpret_cast<const char*>(of_host);
    if (*reason != '\0') {
      text += text.empty() ? "" : "; ";
      text += host == layout.own_host
                  ? reason
                  : concat("on the host of ", name_ranks(layout.hosts[host]), ": ", reason);
    }
    for (std::size_t index = 0; index < layout.hosts[host].size(); ++index) {
      if (of_host[flags_at + index] != std::byte{0}) {
        missing.push_back(layout.hosts[host][index]);
      }
    }
  }
  std::sort(missing.begin(), missing.end());
  if (!missing.empty()) {
    throw TimeoutError(text, missing);
  }
  if (!text.empty()) {
    throw GroupError(text);
  }
}

void HostCollectives::share_locally(std::byte* whole, const std::vector<Part>& parts,
                                    const Call& call) const {
  if (!parts_.local) {
    return;
  }
  Request request = request_of_bytes(OpKind::kAllGather);
  const Part own = parts[parts_.layout.own_index];
  request.count = own.size();
  for (const Part& part : parts) {
    request.send_counts.push_back(own.size());
    request.recv_counts.push_back(part.size());
    request.inputs.push_back(own.size() > 0 ? ConstSpan{whole + own.begin, own.size()}
                                            : ConstSpan{});
    request.outputs.push_back(part.size() > 0 ? Span{whole + part.begin, part.size()} : Span{});
  }
  run_locally(request, call.operation, call.context);
}

const std::byte* HostCollectives::take_first_step(const Request& request, const TwoSteps& steps,
                                                  const std::byte* brought,
                                                  const std::vector<Part>& parts,
                                                  const Call& call) {
  const std::size_t element = element_bytes(steps.between);
  const Part own = parts_.layout.is_in_column() ? parts[parts_.layout.own_index] : Part{};
  if (!parts_.local && steps.first != ReduceOp::kPremulSum) {
    return brought + own.begin * element;
  }
  std::byte* const made = partial_.need(own.size() * element);
  if (!parts_.local) {
    const void* const source = brought + own.begin * element;
    horon::reduce(made, &source, 1, own.size(), steps.between, steps.first, &request.factor);
    return made;
  }
  Request part;
  part.kind = OpKind::kReduceScatter;
  part.dtype = steps.between;
  part.type_code = static_cast<std::uint8_t>(steps.between);
  part.op = steps.first;
  part.factor = request.factor;
  part.element_bytes = element;
  part.count = own.size();
  for (std::size_t each = 0; each < n_neighbours(); ++each) {
    const Part its = each < parts.size() ? parts[each] : Part{};
    part.send_counts.push_back(its.size());
    part.recv_counts.push_back(own.size());
    part.inputs.push_back(its.size() > 0
                              ? ConstSpan{brought + its.begin * element, its.size() * element}
                              : ConstSpan{});
  }
  part.outputs.push_back({own.size() > 0 ? made : nullptr, own.size() * element});
  run_locally(part, call.operation, call.context);
  return made;
}

void HostCollectives::reduce(const Request& request, const TwoSteps& steps, const Call& call) {
  const HostLayout& layout = parts_.layout;
  const std::size_t element = request.element_bytes;
  const std::size_t between = element_bytes(steps.between);
  const std::uint64_t piece =
      part_bytes(steps.widens() ? layout.n_columns : 1) / between * layout.n_columns;
  const bool to_all = pattern(request.kind) == Pattern::kReduceToAll;
  const std::size_t root_host =
      to_all ? layout.own_host : layout.host_of[static_cast<std::size_t>(request.root)];
  const bool gets_result = layout.own_host == root_host;
  for (std::uint64_t done = 0; done < request.count; done += piece) {
    const std::uint64_t count = std::min(piece, request.count - done);
    const std::byte* brought = request.inputs[0].data + done * element;
    if (steps.widens()) {
      std::byte* const wide = brought_.need(count * between);
      widen_halves(steps.result, brought, wide, count);
      brought = wide;
    }
    std::vector<Part> columns;
    std::vector<Part> bytes;  // of the result, by rank of this host
    for (std::size_t each = 0; each < n_neighbours(); ++each) {
      const Part part = part_of_column(count, each);
      if (each < layout.n_columns) {
        columns.push_back(part);
      }
      bytes.push_back({part.begin * element, part.end * element});
    }
    const std::byte* const partial = take_first_step(request, steps, brought, columns, call);
    const Part own = own_part(count);
    const bool is_target = to_all || layout.own_rank() == request.root;
    std::byte* whole = nullptr;  // the result of this piece
    if (is_target) {
      whole = request.outputs[0].data + done * element;
    } else if (gets_result) {
      whole = result_.need(count * element);
    }
    if (layout.is_in_column()) {
      const auto fold = [&](std::byte* result, const void* const* sources, std::uint64_t n) {
        take_second_step(steps, result, scratch_.need(steps.widens() ? n * between : 0), sources,
                         static_cast<int>(layout.n_hosts()), n);
      };
      SlicedReduction sliced{own.size(), between, element,
                             to_all ? -1 : static_cast<int>(root_host), fold};
      reduce_in_slices(*parts_.column, static_cast<int>(layout.own_host),
                       static_cast<int>(layout.n_hosts()), sliced, partial,
                       gets_result ? whole + own.begin * element : nullptr, received_,
                       with_patience(call.context, 1));
    }
    if (to_all) {
      share_locally(whole, bytes, patient(call));
    } else if (gets_result) {
      give_to_root(layout.index_of(request.root), whole, bytes, patient(call));
    }
  }
}

void HostCollectives::give_to_root(std::size_t root, std::byte* whole,
                                   const std::vector<Part>& parts, const Call& call) const {
  if (!parts_.local) {
    return;
  }
  const std::size_t own_index = parts_.layout.own_index;
  const Part own = parts[own_index];
  Request request = request_of_bytes(OpKind::kGather);
  request.root = static_cast<int>(root);
  request.count = own.size();
  for (std::size_t each = 0; each < parts.size(); ++each) {
    const Part sent = each == root ? own : Part{};
    const Part received = own_index == root ? parts[each] : Part{};
    request.send_counts.push_back(sent.size());
    request.recv_counts.push_back(received.size());
    request.inputs.push_back(sent.size() > 0 ? ConstSpan{whole + sent.begin, sent.size()}
                                             : ConstSpan{});
    request.outputs.push_back(received.size() > 0 ? Span{whole + received.begin, received.size()}
                                                  : Span{});
  }
  run_locally(request, call.operation, call.context);
}

void HostCollectives::reduce_scatter(const Request& request, const TwoSteps& steps,
                                     const Call& call) {
  const HostLayout& layout = parts_.layout;
  const std::size_t element = request.element_bytes;
  const std::size_t between = element_bytes(steps.between);
  // Of each host: where the elements of each of its ranks begin, and how many there are.
  std::vector<Sizes> begins;
  std::uint64_t longest = 0;
  for (const std::vector<int>& ranks : layout.hosts) {
    Sizes at{0};
    for (const int rank : ranks) {
      at.push_back(at.back() + request.inputs[static_cast<std::size_t>(rank)].bytes / element);
    }
    longest = std::max(longest, at.back());
    begins.push_back(std::move(at));
  }
  const std::uint64_t piece =
      part_bytes(layout.n_columns * layout.n_hosts()) / between * layout.n_columns;
  for (std::uint64_t done = 0; done < longest; done += piece) {
    const auto piece_of = [&](std::size_t host) {
      const std::uint64_t all = begins[host].back();
      return Part{std::min(all, done), std::min(all, done + piece)};
    };
    // Column by column, and host by host in each.
    std::uint64_t total = 0;
    for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
      total += piece_of(host).size();
    }
    std::byte* const brought = brought_.need(total * between);
    std::uint64_t filled = 0;
    std::vector<Part> columns;
    Sizes send_bytes;
    for (std::size_t column = 0; column < layout.n_columns; ++column) {
      const std::uint64_t begin = filled;
      for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
        const Part of_host = piece_of(host);
        const Part part = part_of(of_host.size(), column, layout.n_columns);
        take_input(request, steps, layout.hosts[host], begins[host],
                   {of_host.begin + part.begin, of_host.begin + part.end},
                   brought + filled * between);
        filled += part.size();
        if (column == layout.own_index) {
          send_bytes.push_back(part.size() * between);
        }
      }
      columns.push_back({begin, filled});
    }
    const std::byte* const partial = take_first_step(request, steps, brought, columns, call);
    const Part of_host = piece_of(layout.own_host);
    const Part own = own_part(of_host.size());
    std::byte* const result = result_.need(own.size() * element);
    if (layout.is_in_column()) {
      const std::uint64_t own_bytes = own.size() * between;
      const std::byte* from = partial;
      SentSpans send;
      for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
        send.push_back({from, send_bytes[host]});
        from += send_bytes[host];
      }
      const auto sources = exchange_parts(*parts_.column, static_cast<int>(layout.own_host), send,
                                          received_.need(own_bytes * (layout.n_hosts() - 1)),
                                          with_patience(call.context, 1));
      take_second_step(steps, result, scratch_.need(own_bytes), sources.data(),
                       static_cast<int>(layout.n_hosts()), own.size());
    }
    hand_out(request, begins[layout.own_host], of_host, result, patient(call));
  }
}

void HostCollectives::take_input(const Request& request, const TwoSteps& steps,
                                 const std::vector<int>& ranks, const Sizes& begins, Part range,
                                 std::byte* to) {
  const std::size_t element = request.element_bytes;
  const std::size_t between = element_bytes(steps.between);
  for (std::size_t each = 0; each < ranks.size(); ++each) {
    const std::uint64_t begin = std::max(range.begin, begins[each]);
    const std::uint64_t end = std::min(range.end, begins[each + 1]);
    if (begin >= end) {
      continue;
    }
    const std::byte* const from = request.inputs[static_cast<std::size_t>(ranks[each])].data +
                                  (begin - begins[each]) * element;
    if (steps.widens()) {
      widen_halves(steps.result, from, to, end - begin);
    } else {
      std::memcpy(to, from, (end - begin) * element);
    }
    to += (end - begin) * between;
  }
}

void HostCollectives::hand_out(const Request& request, const Sizes& begins, Part of_host,
                               const std::byte* result, const Call& call) const {
  const HostLayout& layout = parts_.layout;
  const std::size_t element = request.element_bytes;
  // Which elements of the host's stretch a column has, and which of them a rank gets.
  const auto shared_by = [&](std::size_t column, std::size_t index) {
    const Part part = part_of_column(of_host.size(), column);
    const std::uint64_t begin = std::max(of_host.begin + part.begin, begins[index]);
    return Part{begin, std::max(begin, std::min(of_host.begin + part.end, begins[index + 1]))};
  };
  const std::uint64_t own_begin = of_host.begin + own_part(of_host.size()).begin;
  std::byte* const output = request.outputs[0].data;
  if (!parts_.local) {
    copy_some(output + of_host.begin * element, result, of_host.size() * element);
    return;
  }
  Request part = request_of_bytes(OpKind::kAllToAll);
  for (std::size_t each = 0; each < n_neighbours(); ++each) {
    const Part sent = shared_by(layout.own_index, each);
    const Part received = shared_by(each, layout.own_index);
    part.send_counts.push_back(sent.size() * element);
    part.recv_counts.push_back(received.size() * element);
    part.inputs.push_back(sent.size() > 0 ? ConstSpan{result + (sent.begin - own_begin) * element,
                                                      sent.size() * element}
                                          : ConstSpan{});
    part.outputs.push_back(
        received.size() > 0 ? Span{output + (received.begin - begins[layout.own_index]) * element,
                                   received.size() * element}
                            : Span{});
  }
  part.count = part.send_counts[layout.own_index];
  run_locally(part, call.operation, call.context);
}

void HostCollectives::exchange_with_neighbours(const Request& request, const Call& call) {
  const HostLayout& layout = parts_.layout;
  const bool is_shared = has_shared_input(request.kind);
  Request part = request_of_bytes(is_shared ? OpKind::kAllGather : OpKind::kAllToAll);
  if (request.kind == OpKind::kBroadcast) {
    if (!layout.is_neighbour(request.root)) {
      return;
    }
    part.kind = OpKind::kBroadcast;
    part.root = static_cast<int>(layout.index_of(request.root));
    part.count = request.count * request.element_bytes;
  }
  for (const int neighbour : layout.neighbours()) {
    const auto rank = static_cast<std::size_t>(neighbour);
    part.send_counts.push_back(request.inputs[rank].bytes);
    part.recv_counts.push_back(request.outputs[rank].bytes);
    part.inputs.push_back(request.inputs[rank]);
    part.outputs.push_back(request.outputs[rank]);
  }
  if (request.kind != OpKind::kBroadcast) {
    part.count = part.send_counts[layout.own_index];
  }
  if (parts_.local) {
    run_locally(part, call.operation, call.context);
  } else {
    const auto own = static_cast<std::size_t>(layout.own_rank());
    if (request.outputs[own].data != request.inputs[own].data) {
      copy_some(request.outputs[own].data, request.inputs[own].data, request.outputs[own].bytes);
    }
  }
}

// What each host has that all others get, as one stretch of bytes, and where its ranks' are in it.
class HostCollectives::Shared {
 public:
  Shared(const HostLayout& layout, const Request& request, const std::vector<HeaderView>& headers) {
    for (const std::vector<int>& ranks : layout.hosts) {
      Sizes at{0};
      for (const int rank : ranks) {
        const std::uint64_t* const sent = headers[static_cast<std::size_t>(rank)].send_counts;
        at.push_back(at.back() +
                     *std::max_element(sent, sent + headers.size()) * request.element_bytes);
      }
      longest_ = std::max(longest_, at.back());
      begins_.push_back(std::move(at));
    }
  }

  std::uint64_t longest() const { return longest_; }
  // Of [done, done + piece), what a host has.
  Part piece_of(std::size_t host, std::uint64_t done, std::uint64_t piece) const {
    const std::uint64_t all = begins_[host].back();
    return {std::min(all, done), std::min(all, done + piece)};
  }
  // Calls visit(index, offset, at, bytes) for each rank of the host, by index, with bytes in
  // `range`: where these begin among the rank's own, and in the range.
  template <typename Visit>
  void visit(std::size_t host, Part range, const Visit& visit) const {
    const Sizes& begins = begins_[host];
    for (std::size_t each = 0; each + 1 < begins.size(); ++each) {
      const std::uint64_t begin = std::max(range.begin, begins[each]);
      const std::uint64_t end = std::min(range.end, begins[each + 1]);
      if (begin < end) {
        visit(each, begin - begins[each], begin - range.begin, end - begin);
      }
    }
  }

 private:
  std::vector<Sizes> begins_;  // by host and rank of the host, and the end
  std::uint64_t longest_ = 0;
};

void HostCollectives::share_between_hosts(const Request& request,
                                          const std::vector<HeaderView>& headers,
                                          const Call& call) {
  const HostLayout& layout = parts_.layout;
  const Shared shared(layout, request, headers);
  const std::uint64_t piece =
      part_bytes(layout.n_columns * (layout.n_hosts() - 1)) * layout.n_columns;
  const auto source_of = [&](std::size_t index) {
    const int rank = layout.neighbours()[index];
    if (rank != layout.own_rank()) {
      return static_cast<const std::byte*>(request.outputs[static_cast<std::size_t>(rank)].data);
    }
    // To the others it gives the same.
    const auto given = std::find_if(request.inputs.begin(), request.inputs.end(),
                                    [](const ConstSpan& input) { return input.bytes > 0; });
    return given->data;
  };
  for (std::uint64_t done = 0; done < shared.longest(); done += piece) {
    const auto range_of = [&](std::size_t host, std::size_t column) {
      const Part of_host = shared.piece_of(host, done, piece);
      const Part part = part_of_column(of_host.size(), column);
      return Part{of_host.begin + part.begin, of_host.begin + part.end};
    };
    // Of each column what it receives from all other hosts, host by host.
    std::vector<Part> columns;
    std::uint64_t end = 0;
    for (std::size_t column = 0; column < n_neighbours(); ++column) {
      const std::uint64_t begin = end;
      for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
        end += host == layout.own_host ? 0 : range_of(host, column).size();
      }
      columns.push_back({begin, end});
    }
    std::byte* const received = result_.need(end);
    if (layout.is_in_column()) {
      const Part own = range_of(layout.own_host, layout.own_index);
      std::byte* const sent = received_.need(own.size());
      shared.visit(
          layout.own_host, own,
          [&](std::size_t index, std::uint64_t offset, std::uint64_t to, std::uint64_t bytes) {
            std::memcpy(sent + to, source_of(index) + offset, bytes);
          });
      SentSpans send;
      ReceivedSpans receive;
      std::byte* next = received + columns[layout.own_index].begin;
      for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
        const bool is_own = host == layout.own_host;
        send.push_back({sent, is_own ? 0 : own.size()});
        receive.push_back({next, is_own ? 0 : range_of(host, layout.own_index).size()});
        next += receive.back().bytes;
      }
      parts_.column->exchange(send, receive, with_patience(call.context, 1));
    }
    share_locally(received, columns, patient(call));
    const std::byte* from = received;
    for (std::size_t column = 0; column < layout.n_columns; ++column) {
      for (std::size_t host = 0; host < layout.n_hosts(); ++host) {
        if (host == layout.own_host) {
          continue;
        }
        const Part range = range_of(host, column);
        shared.visit(
            host, range,
            [&](std::size_t index, std::uint64_t offset, std::uint64_t at, std::uint64_t bytes) {
              const auto rank = static_cast<std::size_t>(layout.hosts[host][index]);
              std::memcpy(request.outputs[rank].data + offset, from + at, bytes);
            });
        from += range.size();
      }
    }
  }
}

}  // namespace horon
