#include "core/inline_collective.h"

#include <cstring>

#include "core/published_stream.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

using Sources = InlineVector<const void*, 16>;

void exchange(const Request& request, const std::vector<HeaderView>& headers, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  const ConstSpan& from = request.inputs[own];
  const Span& to = request.outputs[own];
  if (to.bytes > 0 && to.data != from.data) {
    std::memmove(to.data, from.data, to.bytes);
  }
  const int n_ranks = static_cast<int>(headers.size());
  for (int offset = 1; offset < n_ranks; ++offset) {
    const int source = (rank + offset) % n_ranks;
    const StreamRange range = range_for(headers, source, rank);
    if (range.bytes > 0) {
      std::memcpy(request.outputs[static_cast<std::size_t>(source)].data,
                  headers[static_cast<std::size_t>(source)].inline_data + range.offset,
                  range.bytes);
    }
  }
}

void reduce_whole(const Request& request, const std::vector<HeaderView>& headers, int rank) {
  if (request.kind == OpKind::kReduce && rank != request.root) {
    return;
  }
  Sources sources;
  for (const HeaderView& view : headers) {
    sources.push_back(view.inline_data);
  }
  reduce(request.outputs[0].data, sources.data(), static_cast<int>(headers.size()), request.count,
         request.dtype, request.op, factors_of(headers).data());
}

void reduce_scatter(const Request& request, const std::vector<HeaderView>& headers, int rank) {
  const int n_ranks = static_cast<int>(headers.size());
  Sources sources;
  for (int source = 0; source < n_ranks; ++source) {
    if (source == rank) {
      sources.push_back(request.inputs[static_cast<std::size_t>(rank)].data);
    } else {
      const StreamRange range = range_for(headers, source, rank);
      sources.push_back(headers[static_cast<std::size_t>(source)].inline_data + range.offset);
    }
  }
  reduce(request.outputs[0].data, sources.data(), n_ranks,
         request.outputs[0].bytes / request.element_bytes, request.dtype, request.op,
         factors_of(headers).data());
}

}  // namespace

bool are_inline(const std::vector<HeaderView>& headers) {
  for (const HeaderView& view : headers) {
    if (view.header->is_inline == 0) {
      return false;
    }
  }
  return true;
}

PerRank<double> factors_of(const std::vector<HeaderView>& headers) {
  PerRank<double> factors;
  if (headers[0].header->op == ReduceOp::kPremulSum) {
    for (const HeaderView& view : headers) {
      factors.push_back(view.header->factor);
    }
  }
  return factors;
}

void run_inline(const Request& request, const std::vector<HeaderView>& headers, int rank) {
  switch (pattern(request.kind)) {
    case Pattern::kNone:
      break;
    case Pattern::kExchange:
      exchange(request, headers, rank);
      break;
    case Pattern::kReduceToAll:
    case Pattern::kReduceToRoot:
      reduce_whole(request, headers, rank);
      break;
    case Pattern::kReduceScatter:
      reduce_scatter(request, headers, rank);
      break;
  }
}

}  // namespace horon
