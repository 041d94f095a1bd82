#include "nccl/nccl_plan.h"

#include <algorithm>

#include "core/error.h"
#include "nccl/scratch_room.h"

namespace horon {
namespace {

// An all-reduce of one element is a barrier.
constexpr std::size_t kBarrierBytes = 4;

// What is only moved.
constexpr NcclReduction kAsBytes{.dtype = NcclDataType::kUint8};

bool is_gather_to_all(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kAllGatherSingle ||
         kind == OpKind::kAllGatherCoalesced;
}

bool are_equal(const PerRank<std::uint64_t>& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](std::uint64_t count) { return count == counts[0]; });
}

// Whether the spans are one piece of memory, in the order of the ranks.
template <class AnySpan>
bool are_adjacent(const PerRank<AnySpan>& spans) {
  for (std::size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].data != spans[i - 1].data + spans[i - 1].bytes) {
      return false;
    }
  }
  return true;
}

template <class AnySpan>
std::size_t total_bytes(const PerRank<AnySpan>& spans) {
  std::size_t bytes = 0;
  for (const AnySpan& span : spans) {
    bytes += span.bytes;
  }
  return bytes;
}

std::size_t scratch_bytes(const Request& request, int n_ranks) {
  if (pattern(request.kind) == Pattern::kNone) {
    return n_ranks > 1 ? kBarrierBytes : 0;
  }
  if (is_gather_to_all(request.kind) && are_equal(request.recv_counts) &&
      !are_adjacent(request.outputs)) {
    return total_bytes(request.outputs);
  }
  if (pattern(request.kind) == Pattern::kReduceScatter && are_equal(request.send_counts) &&
      !are_adjacent(request.inputs)) {
    return total_bytes(request.inputs);
  }
  return 0;
}

// Plans one request, with its own part of the scratch memory.
class RequestPlanner {
 public:
  RequestPlanner(NcclPlan& plan, const Request& request, const NcclPlace& place, std::byte* scratch)
      : plan_(plan), request_(request), place_(place), scratch_(scratch) {}

  void run() {
    if (!request_.refusal.empty()) {
      throw UsageError(concat(name(request_.kind), ": ", request_.refusal));
    }
    switch (pattern(request_.kind)) {
      case Pattern::kNone:
        barrier();
        break;
      case Pattern::kReduceToAll:
        reduce(NcclFunction::kAllReduce);
        break;
      case Pattern::kReduceToRoot:
        reduce(NcclFunction::kReduce);
        break;
      case Pattern::kReduceScatter:
        reduce_scatter();
        break;
      case Pattern::kExchange:
        exchange();
        break;
    }
  }

 private:
  std::size_t own() const { return static_cast<std::size_t>(place_.rank); }

  void add(NcclFunction function, const void* send, void* recv, std::uint64_t count,
           const NcclReduction& reduction, int peer) {
    if (count == 0) {
      return;
    }
    if (place_.n_ranks == 1 && function != NcclFunction::kSend && function != NcclFunction::kRecv) {
      if (reduction.has_factor) {
        scale_alone({function, send, recv, count, reduction, peer});
      } else {
        copy_alone(send, recv, count * element_bytes(reduction.dtype));
      }
      return;
    }
    plan_.calls.push_back({function, send, recv, count, reduction, peer});
  }

  // See Note [Groups of one].
  void copy_alone(const void* send, void* recv, std::uint64_t bytes) {
    const auto source = reinterpret_cast<std::uint64_t>(send);
    const auto destination = reinterpret_cast<std::uint64_t>(recv);
    if (source != destination && bytes > 0) {
      plan_.before.push_back({source, destination, bytes});
    }
  }

  void scale_alone(NcclCall call) {
    constexpr std::uint64_t kBytesPerBlock = std::uint64_t{16} << 10;
    constexpr std::uint64_t kMostBlocks = 32;
    constexpr std::uint64_t kDividedBytes = kMostBlocks * 16;
    const std::uint64_t element = element_bytes(call.reduction.dtype);
    std::uint64_t left = call.count * element;
    while (left > 0) {
      const std::uint64_t bytes = left >= kMostBlocks * kBytesPerBlock
                                      ? left / kDividedBytes * kDividedBytes
                                      : std::min(left, kBytesPerBlock);
      call.count = bytes / element;
      plan_.calls.push_back(call);
      call.send = static_cast<const std::byte*>(call.send) + bytes;
      call.recv = static_cast<std::byte*>(call.recv) + bytes;
      left -= bytes;
    }
  }

  void move(NcclFunction function, const void* send, void* recv, std::uint64_t bytes, int peer) {
    add(function, send, recv, bytes, kAsBytes, peer);
  }

  NcclReduction reduction() const {
    return nccl_reduction(request_.kind, request_.dtype, place_.float8, request_.op,
                          request_.factor);
  }

  void require_counts(bool fit, const PerRank<std::uint64_t>& counts) const {
    if (!fit) {
      throw UsageError(concat(name(request_.kind), ": rank ", place_.rank, " has ", request_.count,
                              " elements, but the list of all ranks says ", counts[own()],
                              ". Pass tensors of the same sizes on all ranks."));
    }
  }

  void barrier() {
    if (has_window(request_.kind) || request_.kind == OpKind::kNewEmptyWindow) {
      throw UsageError(concat(name(request_.kind), ": windows are for CPU tensors."));
    }
    if (place_.n_ranks > 1) {
      NcclReduction one;
      one.dtype = NcclDataType::kInt32;
      add(NcclFunction::kAllReduce, scratch_, scratch_, 1, one, 0);
    }
  }

  void reduce(NcclFunction function) {
    const NcclReduction how = reduction();
    const bool receives = function == NcclFunction::kAllReduce || place_.rank == request_.root;
    add(function, request_.inputs[0].data, receives ? request_.outputs[0].data : nullptr,
        request_.count * how.parts_per_element, how, request_.root);
  }

  void reduce_scatter() {
    const NcclReduction how = reduction();
    const auto& counts = request_.send_counts;
    require_counts(counts[own()] == request_.count, counts);
    std::byte* output = request_.outputs[0].data;
    if (are_equal(counts)) {
      const std::byte* input = request_.inputs[0].data;
      if (!are_adjacent(request_.inputs)) {
        std::byte* staged = scratch_;
        for (const ConstSpan& part : request_.inputs) {
          plan_.before.push_back({address_of(part.data), address_of(staged), part.bytes});
          staged += part.bytes;
        }
        input = scratch_;
      }
      add(NcclFunction::kReduceScatter, input, output, request_.count * how.parts_per_element, how,
          0);
      return;
    }
    for (std::size_t owner = 0; owner < counts.size(); ++owner) {
      add(NcclFunction::kReduce, request_.inputs[owner].data, owner == own() ? output : nullptr,
          counts[owner] * how.parts_per_element, how, static_cast<int>(owner));
    }
  }

  void exchange() {
    if (request_.kind == OpKind::kBroadcast) {
      broadcast();
    } else if (is_gather_to_all(request_.kind)) {
      all_gather();
    } else if (request_.kind == OpKind::kNewWindow || has_window(request_.kind)) {
      throw UsageError(concat(name(request_.kind), ": windows are for CPU tensors."));
    } else {
      send_and_receive();
    }
  }

  void broadcast() {
    if (place_.n_ranks == 1) {
      return;
    }
    const auto root = static_cast<std::size_t>(request_.root);
    if (place_.rank == request_.root) {
      const ConstSpan& source = request_.inputs[root == 0 ? 1 : 0];  // the same for all others
      // In place: NCCL writes nothing on the root then.
      move(NcclFunction::kBroadcast, source.data, const_cast<std::byte*>(source.data), source.bytes,
           request_.root);
    } else {
      const Span& target = request_.outputs[root];
      move(NcclFunction::kBroadcast, target.data, target.data, target.bytes, request_.root);
    }
  }

  void all_gather() {
    const auto& counts = request_.recv_counts;
    require_counts(counts[own()] == request_.count, counts);
    const ConstSpan& input = request_.inputs[own()];
    if (!are_equal(counts)) {
      for (std::size_t source = 0; source < counts.size(); ++source) {
        const Span& target = request_.outputs[source];
        move(NcclFunction::kBroadcast, source == own() ? input.data : target.data, target.data,
             target.bytes, static_cast<int>(source));
      }
      return;
    }
    if (are_adjacent(request_.outputs)) {
      move(NcclFunction::kAllGather, input.data, request_.outputs[0].data, input.bytes, 0);
      return;
    }
    move(NcclFunction::kAllGather, input.data, scratch_, input.bytes, 0);
    const std::byte* staged = scratch_;
    for (const Span& target : request_.outputs) {
      plan_.after.push_back({address_of(staged), address_of(target.data), target.bytes});
      staged += target.bytes;
    }
  }

  // Also to and from itself: NCCL copies.
  void send_and_receive() {
    const std::size_t sent = request_.inputs[own()].bytes;
    if (const std::size_t received = request_.outputs[own()].bytes; sent != received) {
      throw UsageError(concat(name(request_.kind), ": rank ", place_.rank, " sends itself ", sent,
                              " bytes, and receives ", received,
                              ". Pass tensors, or split sizes, that agree."));
    }
    if (place_.n_ranks == 1) {
      copy_alone(request_.inputs[0].data, request_.outputs[0].data, sent);
      return;
    }
    for (std::size_t peer = 0; peer < request_.inputs.size(); ++peer) {
      const ConstSpan& source = request_.inputs[peer];
      const Span& target = request_.outputs[peer];
      move(NcclFunction::kSend, source.data, nullptr, source.bytes, static_cast<int>(peer));
      move(NcclFunction::kRecv, nullptr, target.data, target.bytes, static_cast<int>(peer));
    }
  }

  NcclPlan& plan_;
  const Request& request_;
  const NcclPlace& place_;
  std::byte* const scratch_;
};

}  // namespace

const char* name(NcclFunction function) {
  switch (function) {
    case NcclFunction::kAllReduce:
      return "ncclAllReduce";
    case NcclFunction::kBroadcast:
      return "ncclBroadcast";
    case NcclFunction::kReduce:
      return "ncclReduce";
    case NcclFunction::kAllGather:
      return "ncclAllGather";
    case NcclFunction::kReduceScatter:
      return "ncclReduceScatter";
    case NcclFunction::kSend:
      return "ncclSend";
    case NcclFunction::kRecv:
      return "ncclRecv";
  }
  return "unknown";
}

std::size_t scratch_bytes(const std::vector<Request>& requests, int n_ranks) {
  std::size_t bytes = 0;
  for (const Request& request : requests) {
    bytes += scratch_room(scratch_bytes(request, n_ranks));
  }
  return bytes;
}

NcclPlan plan_nccl(const std::vector<Request>& requests, const NcclPlace& place) {
  HORON_CHECK(place.scratch != nullptr || scratch_bytes(requests, place.n_ranks) == 0,
              "NCCL plan: ", scratch_bytes(requests, place.n_ranks),
              " bytes of scratch memory are needed, got none.");
  NcclPlan plan;
  plan.calls.reserve(place.n_ranks == 1 ? 0 : requests.size());
  std::size_t offset = 0;
  for (const Request& request : requests) {
    RequestPlanner(plan, request, place,
                   place.scratch == nullptr ? nullptr : place.scratch + offset)
        .run();
    offset += scratch_room(scratch_bytes(request, place.n_ranks));
  }
  return plan;
}

NcclCall plan_send(const ConstSpan& message, int peer) {
  return {NcclFunction::kSend, message.data, nullptr, message.bytes, kAsBytes, peer};
}

NcclCall plan_recv(const Span& message, int peer) {
  return {NcclFunction::kRecv, nullptr, message.data, message.bytes, kAsBytes, peer};
}

}  // namespace horon
