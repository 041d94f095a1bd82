#include "shm/arena_collectives.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/published_stream.h"
#include "reduce/reduce.h"
#include "shm/from_the_end.h"
#include "shm/line_copies.h"
#include "shm/rank_slice.h"
#include "shm/segment.h"

namespace horon {
namespace {

// Bytes that are reduced at a time. The result is still in the first-level cache when it is stored
// into the other tensors. With 16 KiB, of which two tensors fill that cache, gradients of 8 MiB
// took a tenth longer where the cores shared no other one, and the same where they did.
constexpr std::size_t kBlockBytes = 4096;

// What is done one way at a time: long enough to be timed, and many in a gradient.
constexpr std::size_t kPartBytes = std::size_t{128} << 10;

// See Note [From the end].
constexpr std::size_t kStretchBytes = std::size_t{1} << 20;

bool overlap(const ConstSpan& a, const Span& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

// The inputs as one piece of memory; nothing when they are not.
std::optional<ConstSpan> contiguous_inputs(const Request& request) {
  ConstSpan whole;
  for (const ConstSpan& input : request.inputs) {
    if (input.bytes == 0) {
      continue;
    }
    if (whole.bytes == 0) {
      whole = input;
    } else if (has_shared_input(request.kind)) {
      if (input.data != whole.data) {
        return std::nullopt;
      }
    } else if (input.data == whole.data + whole.bytes) {
      whole.bytes += input.bytes;
    } else {
      return std::nullopt;
    }
  }
  return whole;
}

// Writing an output must not change what others still read. A rank's own part, in place, nobody
// else reads.
bool outputs_spare_inputs(const Request& request, const ConstSpan& inputs, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  for (std::size_t i = 0; i < request.outputs.size(); ++i) {
    const Span& output = request.outputs[i];
    const bool is_own = pattern(request.kind) == Pattern::kReduceScatter || i == own;
    const bool is_in_place = is_own && output.data == request.inputs[own].data &&
                             output.bytes == request.inputs[own].bytes;
    if (!is_in_place && overlap(inputs, output)) {
      return false;
    }
  }
  return true;
}

// A reduction of whole tensors, any part of which any rank can do.
class WholeTensors {
 public:
  WholeTensors(const Request& request, const std::vector<HeaderView>& headers,
               const GroupArenas& arenas, int rank)
      : request_(request) {
    const auto n_ranks = static_cast<int>(headers.size());
    for (int peer = 0; peer < n_ranks; ++peer) {
      const Header& header = *headers[static_cast<std::size_t>(peer)].header;
      tensors_.push_back(arenas.at(peer, header.arena_offset, header.published_bytes));
    }
    // The first one is reduced into, the others get copies.
    if (pattern(request.kind) == Pattern::kReduceToRoot) {
      targets_.push_back(tensors_[static_cast<std::size_t>(request.root)]);
    } else {
      for (int offset = 0; offset < n_ranks; ++offset) {
        targets_.push_back(tensors_[static_cast<std::size_t>((rank + offset) % n_ranks)]);
      }
    }
    for (std::byte* target : targets_) {
      if (target != tensors_[static_cast<std::size_t>(rank)]) {
        peers_targets_.push_back(target);
      }
    }
  }

  // Elements [begin, end).
  void reduce_slice(std::uint64_t begin, std::uint64_t end, const double* factors,
                    SharedStore& store) const {
    const std::size_t element = request_.element_bytes;
    const auto n_ranks = static_cast<int>(tensors_.size());
    const bool is_backward = goes_from_the_end(request_.count * element, n_ranks);
    const std::uint64_t most = is_backward ? kStretchBytes / element : end - begin;
    while (begin < end) {
      const std::uint64_t start = begin + (end - begin - 1) / most * most;
      reduce_stretch(start, end, factors, store);
      end = start;
    }
  }

 private:
  void reduce_stretch(std::uint64_t begin, std::uint64_t end, const double* factors,
                      SharedStore& store) const {
    const std::uint64_t most = kPartBytes / request_.element_bytes;
    for (std::uint64_t start = begin; start < end; start += most) {
      const std::uint64_t part = std::min(most, end - start);
      store.store_part(part * request_.element_bytes,
                       [&](bool asks) { reduce_part(start, start + part, factors, store, asks); });
    }
  }

  // With `asks` the lines of peers are asked for, for writing, a block before their turn.
  void reduce_part(std::uint64_t begin, std::uint64_t end, const double* factors,
                   SharedStore& store, bool asks) const {
    const std::size_t element = request_.element_bytes;
    const auto n_ranks = static_cast<int>(tensors_.size());
    InlineVector<const void*, 16> sources;
    sources.resize(tensors_.size(), nullptr);
    const std::uint64_t block = kBlockBytes / element;
    if (asks) {
      ask_for(begin, std::min(block, end - begin));
    }
    for (std::uint64_t done = begin; done < end; done += block) {
      const std::uint64_t part = std::min(block, end - done);
      const std::size_t offset = done * element;
      for (std::size_t i = 0; i < tensors_.size(); ++i) {
        sources[i] = tensors_[i] + offset;
      }
      if (asks) {
        ask_for(done + part, std::min(block, end - done - part));
      }
      std::byte* const result = targets_[0] + offset;
      std::byte* const also =
          targets_.size() > 1 && !store.wants_copy() ? targets_[1] + offset : nullptr;
      reduce_to_both(result, also, sources.data(), n_ranks, part, request_.dtype, request_.op,
                     factors);
      for (std::size_t i = also != nullptr ? 2 : 1; i < targets_.size(); ++i) {
        store.copy(targets_[i] + offset, result, part * element);
      }
    }
  }

  void ask_for(std::uint64_t begin, std::uint64_t count) const {
    for (const std::byte* target : peers_targets_) {
      prefetch_for_write(target + begin * request_.element_bytes, count * request_.element_bytes);
    }
  }

  const Request& request_;
  InlineVector<std::byte*, 16> tensors_;
  InlineVector<std::byte*, 16> targets_;
  InlineVector<std::byte*, 16> peers_targets_;
};

// What this rank reduces of whole tensors.
Slice own_slice(const Request& request, const std::vector<HeaderView>& headers, int rank) {
  PerRank<std::uint32_t> leads;
  bool any = false;
  for (const HeaderView& view : headers) {
    leads.push_back(view.header->lead_bytes);
    any = any || view.header->lead_bytes != 0;
  }
  return any ? slice_by_lead(request.count, request.element_bytes, rank, leads)
             : slice_of(request.count, request.element_bytes, rank,
                        static_cast<int>(headers.size()));
}

// What `source` has for this rank; null when that is nothing.
const std::byte* part_for(const std::vector<HeaderView>& headers, const GroupArenas& arenas,
                          int source, int rank) {
  const HeaderView& view = headers[static_cast<std::size_t>(source)];
  if (view.send_counts[rank] == 0) {
    return nullptr;
  }
  if (view.header->is_inline != 0) {
    return view.inline_data + range_for(headers, source, rank).offset;
  }
  const std::uint64_t element = view.header->element_bytes;
  std::uint64_t offset = 0;
  if (!has_shared_input(view.header->kind)) {
    for (int peer = 0; peer < rank; ++peer) {
      offset += view.send_counts[peer] * element;
    }
  }
  return arenas.at(source, view.header->arena_offset + offset, view.send_counts[rank] * element);
}

void exchange(const Request& request, const std::vector<HeaderView>& headers,
              const GroupArenas& arenas, int rank) {
  const int n_ranks = static_cast<int>(headers.size());
  // Own part first; then each rank reads from another source at any time.
  const ConstSpan& own_input = request.inputs[static_cast<std::size_t>(rank)];
  const Span& own_output = request.outputs[static_cast<std::size_t>(rank)];
  if (own_output.bytes > 0 && own_output.data != own_input.data) {
    std::memmove(own_output.data, own_input.data, own_output.bytes);
  }
  for (int offset = 1; offset < n_ranks; ++offset) {
    const int source = (rank + offset) % n_ranks;
    if (const std::byte* from = part_for(headers, arenas, source, rank)) {
      const Span& to = request.outputs[static_cast<std::size_t>(source)];
      copy_lines(to.data, from, to.bytes);
    }
  }
}

void reduce_parts(const Request& request, const std::vector<HeaderView>& headers,
                  const GroupArenas& arenas, int rank, const double* factors) {
  const Span& output = request.outputs[0];
  if (output.bytes == 0) {
    return;
  }
  InlineVector<const void*, 16> sources;
  for (int source = 0; source < static_cast<int>(headers.size()); ++source) {
    sources.push_back(source == rank ? request.inputs[static_cast<std::size_t>(rank)].data
                                     : part_for(headers, arenas, source, rank));
  }
  reduce(output.data, sources.data(), static_cast<int>(sources.size()),
         output.bytes / request.element_bytes, request.dtype, request.op, factors);
}

}  // namespace

bool is_reduction_of_whole_tensors(OpKind kind) {
  const Pattern moves = pattern(kind);
  return moves == Pattern::kReduceToAll || moves == Pattern::kReduceToRoot;
}

std::uint64_t arena_offset_of(const Request& request, const GroupArenas& arenas, int rank) {
  if (!arenas.is_usable()) {
    return kSeesNoArenas;
  }
  if (pattern(request.kind) == Pattern::kNone || !request.refusal.empty()) {
    return kNotInArena;
  }
  const auto data = contiguous_inputs(request);
  if (!data || data->bytes == 0 || !arenas.contains(data->data, data->bytes)) {
    return kNotInArena;
  }
  if (is_reduction_of_whole_tensors(request.kind)) {
    // Results are stored where the inputs are.
    const bool in_place = request.outputs.empty() || request.outputs[0].data == data->data;
    return in_place ? arenas.offset_of(data->data) : kNotInArena;
  }
  return outputs_spare_inputs(request, *data, rank) ? arenas.offset_of(data->data) : kNotInArena;
}

bool goes_through_arenas(const std::vector<HeaderView>& headers) {
  bool any = false;
  for (const HeaderView& view : headers) {
    const Header& header = *view.header;
    if (header.arena_offset == kSeesNoArenas) {
      return false;
    }
    if (header.is_inline == 0) {
      if (header.arena_offset == kNotInArena) {
        return false;
      }
      any = true;
    }
  }
  return any;
}

std::uint32_t common_lead(const std::vector<HeaderView>& headers) {
  std::uint32_t least = headers.front().header->lead_bytes;
  for (const HeaderView& view : headers) {
    least = std::min(least, view.header->lead_bytes);
  }
  return least;
}

void claim_in_arenas(const Request& request, const std::vector<HeaderView>& headers,
                     const GroupArenas& arenas, int rank, const double* factors, SharedStore& store,
                     Claims& claims, const WaitContext& context) {
  const WholeTensors tensors(request, headers, arenas, rank);
  claims.share(request.count, request.element_bytes, context,
               [&](std::uint64_t begin, std::uint64_t end) {
                 tensors.reduce_slice(begin, end, factors, store);
               });
}

void run_in_arenas(const Request& request, const std::vector<HeaderView>& headers,
                   const GroupArenas& arenas, int rank, const double* factors, SharedStore& store) {
  switch (pattern(request.kind)) {
    case Pattern::kNone:
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot: {
      const Slice own = own_slice(request, headers, rank);
      WholeTensors(request, headers, arenas, rank).reduce_slice(own.begin, own.end, factors, store);
      break;
    }
    case Pattern::kReduceScatter:
      reduce_parts(request, headers, arenas, rank, factors);
      break;
    case Pattern::kExchange:
      exchange(request, headers, arenas, rank);
      break;
  }
}

void quarantine_tensors(const Request& request, const GroupArenas& arenas) {
  for (const ConstSpan& input : request.inputs) {
    if (input.bytes > 0) {
      arenas.quarantine(input.data);
    }
  }
}

}  // namespace horon
