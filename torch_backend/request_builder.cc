#include "request_builder.h"

#include "core/add_up_to.h"
#include "core/digest.h"
#include "core/error.h"
#include "core/span_index.h"

namespace horon::torch_backend {
namespace {

std::uint64_t count_of(const at::Tensor& tensor) {
  return static_cast<std::uint64_t>(tensor.numel());
}

// Part `index` of a contiguous span that is divided into pieces of `counts` elements.
template <typename AnySpan>
PerRank<AnySpan> divide(const AnySpan& whole, const PerRank<std::uint64_t>& counts,
                        std::size_t element_bytes) {
  PerRank<AnySpan> parts;
  std::size_t offset = 0;
  for (const std::uint64_t count : counts) {
    const std::size_t bytes = count * element_bytes;
    parts.push_back({bytes == 0 ? nullptr : whole.data + offset, bytes});
    offset += bytes;
  }
  return parts;
}

bool are_same(const ConstSpan& a, const ConstSpan& b) {
  return a.data == b.data && a.bytes == b.bytes;
}

// Stages an output that is not read. `inputs` is all that the call reads; where the output shares
// memory with input `i` and harms(i) holds, it gets a stand-in, and changes when all has been read.
template <typename Harms>
Span stage_output_beside(Collective& collective, const at::Tensor& output, const SpanIndex& inputs,
                         const Harms& harms) {
  return inputs.any_overlap(memory_of(output), harms)
             ? stage_output_apart(collective, output, false)
             : stage_output(collective, output, false);
}

// Where tensors lie. Of one that is not contiguous this says nothing; it gets a stand-in anyway.
PerRank<ConstSpan> memory_of_all(const TensorList& tensors) {
  PerRank<ConstSpan> spans;
  for (const at::Tensor& tensor : tensors) {
    spans.push_back(memory_of(tensor));
  }
  return spans;
}

void require_some(OpKind kind, const TensorList& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "horon: ", name(kind),
                    ": expected at least one tensor, got an empty list.");
}

void refuse(Request& request, const std::string& reason) {
  if (request.refusal.empty()) {
    request.refusal = reason;
  }
}

void require_same_dtype(Request& request, const at::Tensor& tensor, const at::Tensor& reference) {
  if (tensor.scalar_type() != reference.scalar_type()) {
    refuse(request, concat("a tensor of ", c10::toString(tensor.scalar_type()), " among ",
                           c10::toString(reference.scalar_type()), "; use one dtype."));
  }
}

// Counts per rank from the user's split list, or equal parts.
PerRank<std::uint64_t> split_counts(Request& request, const at::Tensor& tensor,
                                    const std::vector<int64_t>& splits, int n_ranks,
                                    const char* which) {
  const auto n = static_cast<std::size_t>(n_ranks);
  PerRank<std::uint64_t> counts(n, 0);
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const int64_t row_elements = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    if (rows % n_ranks != 0) {
      refuse(request, concat(which, " has ", rows, " rows, which ", n_ranks,
                             " ranks can not share equally; pass split sizes."));
      return counts;
    }
    counts.assign(n, static_cast<std::uint64_t>(rows / n_ranks * row_elements));
    return counts;
  }
  if (splits.size() != n || !add_up_to(rows, splits)) {
    refuse(request, concat(which, " split sizes: expected ", n_ranks,
                           " non-negative numbers that add up to ", rows, " rows, got ",
                           at::ArrayRef<int64_t>(splits), "."));
    return counts;
  }
  for (std::size_t rank = 0; rank < n; ++rank) {
    counts[rank] = static_cast<std::uint64_t>(splits[rank] * row_elements);
  }
  return counts;
}

// Folds one tensor's type and size into the digest of a coalesced call.
std::uint64_t digest(std::uint64_t seed, const at::Tensor& tensor) {
  return fold_in(fold_in(seed, static_cast<std::uint64_t>(tensor.scalar_type())), count_of(tensor));
}

// Of a call with one input for each output. Returns a digest of one rank's parts, which are the
// inputs or the outputs.
std::uint64_t check_pairs(OpKind kind, const TensorList& outputs, const TensorList& inputs,
                          const TensorList& parts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "horon: ", name(kind), ": ", inputs.size(),
                    " inputs but ", outputs.size(), " outputs.");
  require_some(kind, inputs);
  std::uint64_t batch = inputs.size();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], kind);
    check_writable(outputs[i], kind);
    batch = digest(batch, parts[i]);
  }
  return batch;
}

}  // namespace

Request RequestBuilder::start(OpKind kind, const at::Tensor& tensor) const {
  Request request;
  request.kind = kind;
  request.dtype = to_dtype(tensor.scalar_type());
  request.type_code = static_cast<std::uint8_t>(tensor.scalar_type());
  request.element_bytes = tensor.element_size();
  request.count = count_of(tensor);
  const Pattern moves = pattern(kind);
  if (moves == Pattern::kExchange || moves == Pattern::kReduceScatter) {
    const auto n = static_cast<std::size_t>(n_ranks_);
    request.inputs.resize(n);
    request.outputs.resize(moves == Pattern::kExchange ? n : 1);
    request.send_counts.resize(n);
    request.recv_counts.resize(n);
  }
  return request;
}

void RequestBuilder::check_root(OpKind kind, int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < n_ranks_, "horon: ", name(kind), ": root ", root,
                    " is not a rank of this group of ", n_ranks_, ".");
}

Collective RequestBuilder::barrier(OpKind kind) const {
  Collective collective;
  collective.requests.emplace_back();
  collective.requests[0].kind = kind;
  return collective;
}

Collective RequestBuilder::all_reduce(OpKind kind, const TensorList& tensors,
                                      const Reduction& reduction) const {
  require_some(kind, tensors);
  Collective collective;
  if (kind == OpKind::kAllReduce && tensors.size() == 1 && is_plain_cpu(tensors[0])) {
    // The most frequent call, many a thousand of which may be pending: nothing to stage or compare.
    collective.requests.push_back(all_reduce_in_place(tensors[0], reduction));
    collective.device = tensors[0].device();
    collective.inputs = tensors;  // which keep its memory alive as well
    collective.outputs = tensors;
    return collective;
  }
  std::uint64_t batch = tensors.size();
  for (const at::Tensor& tensor : tensors) {
    check_writable(tensor, kind);
    batch = digest(batch, tensor);
  }
  const PerRank<ConstSpan> memory = memory_of_all(tensors);
  const SpanIndex index(memory);
  collective.requests.reserve(tensors.size());
  collective.kept_alive.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Request request = start(kind, tensors[i]);
    request.op = reduction.op;
    request.factor = reduction.factor;
    request.batch_digest = tensors.size() > 1 || kind == OpKind::kAllReduceCoalesced ? batch : 0;
    const bool is_shared =
        index.any_overlap(memory[i], [i](std::size_t other) { return other < i; });
    const Span span = is_shared ? stage_output_apart(collective, tensors[i], true)
                                : stage_output(collective, tensors[i], true);
    request.inputs = {{span.data, span.bytes}};
    request.outputs = {span};
    collective.requests.push_back(std::move(request));
  }
  collective.inputs = tensors;
  collective.outputs = tensors;
  return collective;
}

Request RequestBuilder::all_reduce_in_place(const at::Tensor& tensor,
                                            const Reduction& reduction) const {
  Request request = start(OpKind::kAllReduce, tensor);
  request.op = reduction.op;
  request.factor = reduction.factor;
  auto* data = static_cast<std::byte*>(request.count == 0 ? nullptr : tensor.data_ptr());
  const std::size_t bytes = request.count * request.element_bytes;
  request.inputs.push_back({data, bytes});
  request.outputs.push_back({data, bytes});
  return request;
}

Collective RequestBuilder::broadcast(const at::Tensor& tensor, int64_t root) const {
  constexpr OpKind kKind = OpKind::kBroadcast;
  check_root(kKind, root);
  Collective collective;
  if (rank_ == root) {
    check_tensor(tensor, kKind);
  } else {
    check_writable(tensor, kKind);
  }
  Request request = start(kKind, tensor);
  request.root = static_cast<int>(root);
  if (rank_ == root) {
    const ConstSpan span = stage_input(collective, tensor);
    for (int peer = 0; peer < n_ranks_; ++peer) {
      if (peer != rank_) {
        request.inputs[static_cast<std::size_t>(peer)] = span;
        request.send_counts[static_cast<std::size_t>(peer)] = request.count;
      }
    }
  } else {
    request.outputs[static_cast<std::size_t>(root)] = stage_output(collective, tensor, false);
    request.recv_counts[static_cast<std::size_t>(root)] = request.count;
  }
  collective.requests.push_back(std::move(request));
  collective.inputs = {tensor};
  collective.outputs = {tensor};
  return collective;
}

Collective RequestBuilder::reduce(const at::Tensor& tensor, const Reduction& reduction,
                                  int64_t root) const {
  constexpr OpKind kKind = OpKind::kReduce;
  if (rank_ == root) {
    check_writable(tensor, kKind);
  } else {
    check_tensor(tensor, kKind);
  }
  check_root(kKind, root);
  Collective collective;
  Request request = start(kKind, tensor);
  request.op = reduction.op;
  request.factor = reduction.factor;
  request.root = static_cast<int>(root);
  if (rank_ == root) {
    const Span span = stage_output(collective, tensor, true);
    request.inputs = {{span.data, span.bytes}};
    request.outputs = {span};
  } else {
    request.inputs = {stage_input(collective, tensor)};
  }
  collective.requests.push_back(std::move(request));
  collective.inputs = {tensor};
  collective.outputs = {tensor};
  return collective;
}

void RequestBuilder::stage_gathered(Collective& collective, Request& request,
                                    const TensorList& outputs, const at::Tensor& input) const {
  const ConstSpan& read = request.inputs[static_cast<std::size_t>(rank_)];
  const SpanIndex read_once(PerRank<ConstSpan>{read});
  for (std::size_t rank = 0; rank < outputs.size() && request.refusal.empty(); ++rank) {
    const at::Tensor& output = outputs[rank];
    check_writable(output, request.kind);
    require_same_dtype(request, output, input);
    const bool is_own = static_cast<int>(rank) == rank_;
    request.outputs[rank] = stage_output_beside(collective, output, read_once, [&](std::size_t) {
      return !is_own || !are_same(read, memory_of(output));
    });
    request.recv_counts[rank] = count_of(output);
  }
}

Collective RequestBuilder::all_gather(const TensorList& outputs, const at::Tensor& input) const {
  constexpr OpKind kKind = OpKind::kAllGather;
  check_tensor(input, kKind);
  Collective collective;
  Request request = start(kKind, input);
  if (outputs.size() != static_cast<std::size_t>(n_ranks_)) {
    refuse(request, concat("expected ", n_ranks_, " output tensors, got ", outputs.size(), "."));
  }
  const ConstSpan span = stage_input(collective, input);
  request.inputs.assign(request.inputs.size(), span);
  request.send_counts.assign(request.send_counts.size(), request.count);
  stage_gathered(collective, request, outputs, input);
  collective.requests.push_back(std::move(request));
  collective.inputs = {input};
  collective.outputs = outputs;
  return collective;
}

Collective RequestBuilder::all_gather_single(OpKind kind, const TensorList& outputs,
                                             const TensorList& inputs) const {
  const std::uint64_t batch = check_pairs(kind, outputs, inputs, inputs);
  Collective collective;
  const PerRank<ConstSpan> memory = memory_of_all(inputs);
  const SpanIndex read(memory);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Request request = start(kind, inputs[i]);
    request.batch_digest = kind == OpKind::kAllGatherCoalesced ? batch : 0;
    require_same_dtype(request, outputs[i], inputs[i]);
    if (outputs[i].numel() != inputs[i].numel() * n_ranks_) {
      refuse(request, concat("the output has ", outputs[i].numel(), " elements, expected ",
                             n_ranks_, " times the input's ", inputs[i].numel(), "."));
    }
    request.inputs.assign(request.inputs.size(), stage_input(collective, inputs[i]));
    request.send_counts.assign(request.send_counts.size(), request.count);
    request.recv_counts = request.send_counts;
    const Span whole = stage_output_beside(collective, outputs[i], read, [&](std::size_t other) {
      return other != i || !is_own_part(memory[i], memory_of(outputs[i]));
    });
    if (request.refusal.empty()) {
      request.outputs = divide(whole, request.recv_counts, request.element_bytes);
    }
    collective.requests.push_back(std::move(request));
  }
  collective.inputs = inputs;
  collective.outputs = outputs;
  return collective;
}

Collective RequestBuilder::gather(const TensorList& outputs, const at::Tensor& input,
                                  int64_t root) const {
  constexpr OpKind kKind = OpKind::kGather;
  check_tensor(input, kKind);
  check_root(kKind, root);
  Collective collective;
  Request request = start(kKind, input);
  request.root = static_cast<int>(root);
  request.inputs[static_cast<std::size_t>(root)] = stage_input(collective, input);
  request.send_counts[static_cast<std::size_t>(root)] = request.count;
  if (rank_ == root && outputs.size() != static_cast<std::size_t>(n_ranks_)) {
    refuse(request,
           concat("expected ", n_ranks_, " output tensors on the root, got ", outputs.size(), "."));
  } else if (rank_ != root && !outputs.empty()) {
    refuse(request, "output tensors are for the root only.");
  }
  stage_gathered(collective, request, outputs, input);
  collective.requests.push_back(std::move(request));
  collective.inputs = {input};
  collective.outputs = outputs;
  return collective;
}

Collective RequestBuilder::gather_single(const at::Tensor& output, const at::Tensor& input,
                                         int64_t root) const {
  constexpr OpKind kKind = OpKind::kGatherSingle;
  check_tensor(input, kKind);
  check_root(kKind, root);
  Collective collective;
  Request request = start(kKind, input);
  request.root = static_cast<int>(root);
  request.inputs[static_cast<std::size_t>(root)] = stage_input(collective, input);
  request.send_counts[static_cast<std::size_t>(root)] = request.count;
  if (rank_ == root) {
    check_writable(output, kKind);
    require_same_dtype(request, output, input);
    if (output.numel() != input.numel() * n_ranks_) {
      refuse(request, concat("the output has ", output.numel(), " elements, expected ", n_ranks_,
                             " times the input's ", input.numel(), "."));
    } else {
      request.recv_counts.assign(request.recv_counts.size(), request.count);
      const ConstSpan& read = request.inputs[static_cast<std::size_t>(root)];
      const Span whole =
          stage_output_beside(collective, output, SpanIndex(PerRank<ConstSpan>{read}),
                              [&](std::size_t) { return !is_own_part(read, memory_of(output)); });
      request.outputs = divide(whole, request.recv_counts, request.element_bytes);
    }
    collective.outputs = {output};
  }
  collective.requests.push_back(std::move(request));
  collective.inputs = {input};
  return collective;
}

bool RequestBuilder::is_own_part(const ConstSpan& part, const ConstSpan& whole) const {
  return part.data == whole.data + static_cast<std::size_t>(rank_) * part.bytes;
}

Span RequestBuilder::stage_own_part(Collective& collective, const Request& request,
                                    const at::Tensor& output) const {
  const auto own = static_cast<std::size_t>(rank_);
  return stage_output_beside(collective, output, SpanIndex(request.inputs), [&](std::size_t other) {
    return other != own || !are_same(request.inputs[own], memory_of(output));
  });
}

Collective RequestBuilder::scatter(const at::Tensor& output, const TensorList& inputs,
                                   int64_t root) const {
  constexpr OpKind kKind = OpKind::kScatter;
  check_writable(output, kKind);
  check_root(kKind, root);
  Collective collective;
  Request request = start(kKind, output);
  request.root = static_cast<int>(root);
  request.recv_counts[static_cast<std::size_t>(root)] = request.count;
  if (rank_ == root && inputs.size() != static_cast<std::size_t>(n_ranks_)) {
    refuse(request,
           concat("expected ", n_ranks_, " input tensors on the root, got ", inputs.size(), "."));
  } else if (rank_ != root && !inputs.empty()) {
    refuse(request, "input tensors are for the root only.");
  }
  for (std::size_t rank = 0; rank < inputs.size() && request.refusal.empty(); ++rank) {
    check_tensor(inputs[rank], kKind);
    require_same_dtype(request, inputs[rank], output);
    request.inputs[rank] = stage_input(collective, inputs[rank]);
    request.send_counts[rank] = count_of(inputs[rank]);
  }
  request.outputs[static_cast<std::size_t>(root)] = stage_own_part(collective, request, output);
  collective.requests.push_back(std::move(request));
  collective.inputs = inputs;
  collective.outputs = {output};
  return collective;
}

Collective RequestBuilder::reduce_scatter(const at::Tensor& output, const TensorList& inputs,
                                          const Reduction& reduction) const {
  constexpr OpKind kKind = OpKind::kReduceScatter;
  check_writable(output, kKind);
  Collective collective;
  Request request = start(kKind, output);
  request.op = reduction.op;
  request.factor = reduction.factor;
  if (inputs.size() != static_cast<std::size_t>(n_ranks_)) {
    refuse(request, concat("expected ", n_ranks_, " input tensors, got ", inputs.size(), "."));
  }
  for (std::size_t rank = 0; rank < inputs.size() && request.refusal.empty(); ++rank) {
    check_tensor(inputs[rank], kKind);
    require_same_dtype(request, inputs[rank], output);
    request.inputs[rank] = stage_input(collective, inputs[rank]);
    request.send_counts[rank] = count_of(inputs[rank]);
  }
  request.outputs[0] = stage_own_part(collective, request, output);
  request.recv_counts.assign(request.recv_counts.size(), request.count);
  collective.requests.push_back(std::move(request));
  collective.inputs = inputs;
  collective.outputs = {output};
  return collective;
}

Collective RequestBuilder::reduce_scatter_single(OpKind kind, const TensorList& outputs,
                                                 const TensorList& inputs,
                                                 const Reduction& reduction) const {
  const std::uint64_t batch = check_pairs(kind, outputs, inputs, outputs);
  Collective collective;
  const PerRank<ConstSpan> memory = memory_of_all(inputs);
  const SpanIndex read(memory);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Request request = start(kind, outputs[i]);
    request.op = reduction.op;
    request.factor = reduction.factor;
    request.batch_digest = kind == OpKind::kReduceScatterCoalesced ? batch : 0;
    require_same_dtype(request, outputs[i], inputs[i]);
    if (inputs[i].numel() != outputs[i].numel() * n_ranks_) {
      refuse(request, concat("the input has ", inputs[i].numel(), " elements, expected ", n_ranks_,
                             " times the output's ", outputs[i].numel(), "."));
    }
    request.send_counts.assign(request.send_counts.size(), request.count);
    request.recv_counts = request.send_counts;
    const ConstSpan whole = stage_input(collective, inputs[i]);
    if (request.refusal.empty()) {
      request.inputs = divide(whole, request.send_counts, request.element_bytes);
    }
    request.outputs[0] = stage_output_beside(collective, outputs[i], read, [&](std::size_t other) {
      return other != i || !is_own_part(memory_of(outputs[i]), memory[i]);
    });
    collective.requests.push_back(std::move(request));
  }
  collective.inputs = inputs;
  collective.outputs = outputs;
  return collective;
}

Collective RequestBuilder::all_to_all(const TensorList& outputs, const TensorList& inputs) const {
  constexpr OpKind kKind = OpKind::kAllToAll;
  TORCH_CHECK_VALUE(!outputs.empty() && !inputs.empty(),
                    "horon: all_to_all: expected one tensor per rank, got an empty list.");
  Collective collective;
  check_tensor(inputs[0], kKind);
  Request request = start(kKind, inputs[0]);
  const auto n = static_cast<std::size_t>(n_ranks_);
  if (outputs.size() != n || inputs.size() != n) {
    refuse(request, concat("expected ", n, " inputs and outputs, got ", inputs.size(), " and ",
                           outputs.size(), "."));
  }
  request.count = 0;
  for (std::size_t rank = 0; rank < n && request.refusal.empty(); ++rank) {
    check_tensor(inputs[rank], kKind);
    check_writable(outputs[rank], kKind);
    require_same_dtype(request, inputs[rank], inputs[0]);
    require_same_dtype(request, outputs[rank], inputs[0]);
    request.inputs[rank] = stage_input(collective, inputs[rank]);
    request.send_counts[rank] = count_of(inputs[rank]);
    request.count += request.send_counts[rank];
    request.recv_counts[rank] = count_of(outputs[rank]);
  }
  const SpanIndex read(request.inputs);
  for (std::size_t rank = 0; rank < n && request.refusal.empty(); ++rank) {
    // Within a host a rank may swap with each peer in place. NCCL receives while it sends.
    const bool swaps_in_place = outputs[rank].is_cpu() || static_cast<int>(rank) == rank_;
    request.outputs[rank] =
        stage_output_beside(collective, outputs[rank], read, [&](std::size_t other) {
          return other != rank || !swaps_in_place ||
                 !are_same(request.inputs[rank], memory_of(outputs[rank]));
        });
  }
  collective.requests.push_back(std::move(request));
  collective.inputs = inputs;
  collective.outputs = outputs;
  return collective;
}

Collective RequestBuilder::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                             const std::vector<int64_t>& output_splits,
                                             const std::vector<int64_t>& input_splits) const {
  constexpr OpKind kKind = OpKind::kAllToAllSingle;
  check_tensor(input, kKind);
  check_writable(output, kKind);
  Collective collective;
  Request request = start(kKind, input);
  require_same_dtype(request, output, input);
  request.send_counts = split_counts(request, input, input_splits, n_ranks_, "the input");
  request.recv_counts = split_counts(request, output, output_splits, n_ranks_, "the output");
  const ConstSpan from = stage_input(collective, input);
  // In place, parts of unequal sizes would come to lie over others.
  const bool swaps_in_place = are_same(from, memory_of(output)) && output.is_cpu() &&
                              request.send_counts == request.recv_counts;
  const Span to = stage_output_beside(collective, output, SpanIndex(PerRank<ConstSpan>{from}),
                                      [&](std::size_t) { return !swaps_in_place; });
  if (request.refusal.empty()) {
    request.inputs = divide(from, request.send_counts, request.element_bytes);
    request.outputs = divide(to, request.recv_counts, request.element_bytes);
  }
  collective.requests.push_back(std::move(request));
  collective.inputs = {input};
  collective.outputs = {output};
  return collective;
}

}  // namespace horon::torch_backend
