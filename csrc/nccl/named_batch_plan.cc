#include "nccl/named_batch_plan.h"

#include "core/error.h"
#include "nccl/scaling.h"
#include "nccl/scratch_room.h"

namespace horon {
namespace {

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

bool is_floating(DType dtype) {
  return is_half(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

constexpr bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

// Depends on nothing but what the ranks have in common. NCCL's average needs no pass of its own,
// but rounds 1/n to the elements' type, which matters for the half types unless n is 2, 4, 8, ...
Scaling scaling_of(const NamedRequest& request, DType dtype, int n_ranks) {
  Scaling scaling{ReduceOp::kSum, request.prescale, request.postscale};
  switch (request.op) {
    case NamedOp::kAverage:
      if (!is_half(dtype) || is_power_of_two(n_ranks)) {
        scaling.op = ReduceOp::kAvg;
      } else if (dtype == DType::kFloat16) {
        scaling.before /= n_ranks;  // the sum might be above 65504
      } else {
        scaling.after /= n_ranks;
      }
      break;
    case NamedOp::kMin:
      scaling.op = ReduceOp::kMin;
      break;
    case NamedOp::kMax:
      scaling.op = ReduceOp::kMax;
      break;
    case NamedOp::kProduct:
      scaling.op = ReduceOp::kProduct;
      break;
    default:
      break;
  }
  return scaling;
}

class BatchPlanner {
 public:
  BatchPlanner(const DeviceBatch& batch, const NamedBatchPlace& place, ScratchMaker make_scratch)
      : batch_(batch),
        place_(place),
        make_scratch_(make_scratch),
        n_(static_cast<std::size_t>(place.n_ranks)),
        rank_(static_cast<std::size_t>(place.rank)) {}

  NamedBatchPlan run() {
    switch (request().kind) {
      case NamedKind::kAllReduce:
        all_reduce();
        break;
      case NamedKind::kAllGather:
        all_gather();
        break;
      case NamedKind::kBroadcast:
        broadcast();
        break;
      case NamedKind::kAllToAll:
        all_to_all();
        break;
      case NamedKind::kReduceScatter:
        reduce_scatter();
        break;
      default:
        throw Error(concat("a batch of ", name(request().kind), " can not be run on a GPU"));
    }
    return std::move(plan_);
  }

 private:
  const BatchTensor& first() const { return batch_.tensors.front(); }
  const NamedRequest& request() const { return *first().request; }

  static void append(std::vector<PackLaunch>& to, std::vector<PackLaunch> launches) {
    std::move(launches.begin(), launches.end(), std::back_inserter(to));
  }

  std::byte* zeroed(std::size_t bytes) {
    std::byte* const memory = make_scratch_(bytes);
    plan_.zeros.push_back({memory, bytes});
    return memory;
  }

  // Multiplies on the way; `to` may be `from`.
  PackTensor scaled(const std::byte* from, std::uint64_t offset, const TensorSpec& spec,
                    std::uint64_t elements) const {
    PackTensor tensor;
    tensor.address = address_of(from);
    tensor.buffer_offset = offset;
    tensor.elements = elements;
    tensor.dtype = spec.dtype;
    if (is_complex(spec.dtype)) {  // real and imaginary parts
      tensor.dtype = spec.dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
      tensor.elements *= 2;
    }
    tensor.buffer_dtype = tensor.dtype;
    return tensor;
  }

  void scale(std::vector<PackLaunch>& launches, const std::byte* from, std::byte* to,
             const TensorSpec& spec, std::uint64_t elements, double factor) {
    append(launches, plan_pack(PackDirection::kPack, {scaled(from, 0, spec, elements)},
                               address_of(to), factor));
  }

  void call(NcclFunction function, const void* send, void* recv, std::size_t bytes,
            const NcclReduction& reduction) {
    NcclCall made;
    made.function = function;
    made.send = send;
    made.recv = recv;
    made.count = bytes / element_bytes(reduction.dtype);
    made.reduction = reduction;
    plan_.calls.push_back(made);
  }

  // Calls of a collective that only moves bytes, or whose parts lie side by side.
  void call_as(const Request& collective) {
    NcclPlace place;
    place.rank = place_.rank;
    place.n_ranks = place_.n_ranks;
    NcclPlan made = plan_nccl({collective}, place);
    HORON_CHECK((made.before.empty() || place_.n_ranks == 1) && made.after.empty(),
                name(request().kind), ": its parts do not lie side by side");
    append(plan_.after, plan_copies(made.before));  // instead of calls: Note [Groups of one]
    std::move(made.calls.begin(), made.calls.end(), std::back_inserter(plan_.calls));
  }

  void all_reduce() {
    const DType dtype = first().spec().dtype;
    const Scaling scaling = scaling_of(request(), dtype, place_.n_ranks);
    if (place_.n_ranks == 1) {
      all_reduce_of_one(scaling.before * scaling.after);
      return;
    }
    const NcclReduction reduction =
        nccl_reduction(OpKind::kAllReduce, dtype, Float8::kNone, scaling.op, 1.0);
    std::vector<FusionTensor> tensors;
    tensors.reserve(batch_.tensors.size());
    for (const BatchTensor& tensor : batch_.tensors) {
      tensors.push_back({tensor.spec().bytes(), 0});
    }
    const FusionDecision decision = decide_fusion(tensors, place_.cost);
    for (const FusionBatch& fused : decision.batches) {
      all_reduce_fused(fused, scaling, reduction);
    }
    for (const std::size_t index : decision.direct) {
      all_reduce_alone(batch_.tensors[index], scaling, reduction);
    }
  }

  // See Note [Groups of one] in nccl_plan.h.
  void all_reduce_of_one(double factor) {
    std::vector<PackTensor> tensors;
    for (const BatchTensor& tensor : batch_.tensors) {
      const NamedOperation::Tensor* own = tensor.own();
      if (own != nullptr && (own->input.data != own->output.data || factor != 1.0)) {
        const TensorSpec& spec = tensor.spec();
        tensors.push_back(
            scaled(own->input.data, address_of(own->output.data), spec, spec.elements()));
      }
    }
    append(plan_.before, plan_pack(PackDirection::kPack, tensors, 0, factor));
  }

  void all_reduce_alone(const BatchTensor& tensor, const Scaling& scaling,
                        const NcclReduction& reduction) {
    const TensorSpec& spec = tensor.spec();
    if (spec.bytes() == 0) {
      return;
    }
    const NamedOperation::Tensor* own = tensor.own();
    std::byte* const output = own != nullptr ? own->output.data : zeroed(spec.bytes());
    const std::byte* input = own != nullptr ? own->input.data : output;
    if (own != nullptr && scaling.before != 1.0) {
      scale(plan_.before, input, output, spec, spec.elements(), scaling.before);
      input = output;
    }
    call(NcclFunction::kAllReduce, input, output, spec.bytes(), reduction);
    if (own != nullptr && scaling.after != 1.0) {
      scale(plan_.after, output, output, spec, spec.elements(), scaling.after);
    }
  }

  // See Note [Tensors that lie as in the buffer]. Null if they do not.
  std::byte* as_in_buffer(const FusionBatch& fused) const {
    std::byte* begin = nullptr;
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < fused.tensors.size(); ++i) {
      const BatchTensor& tensor = batch_.tensors[fused.tensors[i]];
      const NamedOperation::Tensor* own = tensor.own();
      if (own == nullptr || own->input.data != own->output.data || fused.offsets[i] != end) {
        return nullptr;
      }
      begin = i == 0 ? own->output.data : begin;
      if (own->output.data != begin + fused.offsets[i]) {
        return nullptr;
      }
      end = fused.offsets[i] + tensor.spec().bytes();
    }
    return begin;
  }

  void all_reduce_fused(const FusionBatch& fused, const Scaling& scaling,
                        const NcclReduction& reduction) {
    std::byte* memory = as_in_buffer(fused);
    const bool is_in_place = memory != nullptr;
    if (!is_in_place) {
      memory = make_scratch_(fused.bytes);
    }
    std::vector<PackTensor> packed;
    std::vector<PackTensor> unpacked;
    for (std::size_t i = 0; i < fused.tensors.size(); ++i) {
      const BatchTensor& tensor = batch_.tensors[fused.tensors[i]];
      const TensorSpec& spec = tensor.spec();
      const std::uint64_t offset = fused.offsets[i];
      if (const NamedOperation::Tensor* own = tensor.own()) {
        packed.push_back(scaled(own->input.data, offset, spec, spec.elements()));
        unpacked.push_back(scaled(own->output.data, offset, spec, spec.elements()));
      } else {
        plan_.zeros.push_back({memory + offset, spec.bytes()});
      }
    }
    if (!is_in_place || scaling.before != 1.0) {
      append(plan_.before,
             plan_pack(PackDirection::kPack, packed, address_of(memory), scaling.before));
    }
    call(NcclFunction::kAllReduce, memory, memory, fused.bytes, reduction);
    if (!is_in_place || scaling.after != 1.0) {
      append(plan_.after,
             plan_pack(PackDirection::kUnpack, unpacked, address_of(memory), scaling.after));
    }
  }

  std::size_t bytes_of(std::size_t rank, std::size_t tensor) const {
    const std::int64_t rows = batch_.numbers[rank * batch_.tensors.size() + tensor];
    return static_cast<std::size_t>(rows) * batch_.tensors[tensor].spec().bytes();
  }

  std::vector<Span> gathered_outputs() const {
    std::vector<Span> outputs;
    for (std::size_t i = 0; i < batch_.tensors.size(); ++i) {
      std::int64_t rows = 0;
      for (std::size_t rank = 0; rank < n_; ++rank) {
        rows += batch_.numbers[rank * batch_.tensors.size() + i];
      }
      const BatchTensor& tensor = batch_.tensors[i];
      outputs.push_back(tensor.operation ? tensor.operation->allocate(tensor.tensor, rows)
                                         : Span{});
    }
    return outputs;
  }

  // One tensor goes straight from and to its place; several, and what a joined rank takes part in,
  // through scratch memory: this rank's part, then everybody's.
  void all_gather() {
    Request collective;
    collective.kind = OpKind::kAllGather;
    collective.dtype = DType::kUInt8;
    collective.recv_counts.resize(n_, 0);
    std::size_t received = 0;
    for (std::size_t rank = 0; rank < n_; ++rank) {
      for (std::size_t i = 0; i < batch_.tensors.size(); ++i) {
        collective.recv_counts[rank] += bytes_of(rank, i);
      }
      received += collective.recv_counts[rank];
    }
    collective.count = collective.recv_counts[rank_];
    collective.send_counts.resize(n_, collective.count);
    std::vector<Span> outputs = gathered_outputs();
    if (received == 0) {
      return;
    }
    const bool is_direct = batch_.tensors.size() == 1 && first().operation;
    std::byte* const scratch =
        is_direct ? nullptr : make_scratch_(scratch_room(collective.count) + received);
    std::byte* const all = is_direct ? outputs[0].data : scratch + scratch_room(collective.count);
    std::byte* target = all;
    for (std::size_t rank = 0; rank < n_; ++rank) {
      collective.outputs.push_back({target, collective.recv_counts[rank]});
      target += collective.recv_counts[rank];
    }
    const std::byte* const source = is_direct ? first().own()->input.data : scratch;
    collective.inputs.resize(n_, {source, collective.count});
    call_as(collective);
    if (!is_direct) {
      copy_parts(scratch, all, outputs);
    }
  }

  void copy_parts(const std::byte* own_part, const std::byte* all, std::vector<Span>& outputs) {
    std::vector<ByteCopy> before;
    std::uint64_t own = address_of(own_part);
    for (std::size_t i = 0; i < batch_.tensors.size(); ++i) {
      const std::size_t bytes = bytes_of(rank_, i);
      if (bytes > 0) {
        before.push_back({address_of(batch_.tensors[i].own()->input.data), own, bytes});
        own += bytes;
      }
    }
    std::vector<ByteCopy> after;
    std::uint64_t from = address_of(all);
    for (std::size_t rank = 0; rank < n_; ++rank) {
      for (std::size_t i = 0; i < batch_.tensors.size(); ++i) {
        const std::size_t bytes = bytes_of(rank, i);
        if (batch_.tensors[i].operation && bytes > 0) {
          after.push_back({from, address_of(outputs[i].data), bytes});
          outputs[i].data += bytes;
        }
        from += bytes;
      }
    }
    append(plan_.before, plan_copies(before));
    append(plan_.after, plan_copies(after));
  }

  void broadcast() {
    const std::size_t bytes = first().spec().bytes();
    if (bytes == 0) {
      return;
    }
    const NamedOperation::Tensor* own = first().own();
    const auto root = static_cast<std::size_t>(batch_.root);
    Request collective;
    collective.kind = OpKind::kBroadcast;
    collective.root = batch_.root;
    collective.count = bytes;
    collective.inputs.resize(n_);
    collective.outputs.resize(n_);
    if (rank_ != root) {
      collective.outputs[root] = own != nullptr ? own->output : Span{make_scratch_(bytes), bytes};
    } else if (n_ > 1) {
      collective.inputs[root == 0 ? 1 : 0] = own->input;
    }
    call_as(collective);
    if (rank_ == root && own->output.data != own->input.data) {
      append(plan_.after,
             plan_copies({{address_of(own->input.data), address_of(own->output.data), bytes}}));
    }
  }

  void all_to_all() {
    const std::size_t row_bytes = first().spec().bytes();
    const auto bytes_between = [&](std::size_t source, std::size_t destination) {
      return static_cast<std::size_t>(batch_.numbers[source * n_ + destination]) * row_bytes;
    };
    std::int64_t rows = 0;
    for (std::size_t source = 0; source < n_; ++source) {
      rows += batch_.numbers[source * n_ + rank_];
    }
    const std::size_t received = static_cast<std::size_t>(rows) * row_bytes;
    std::byte* output = nullptr;
    if (first().operation) {
      output = first().operation->allocate(first().tensor, rows).data;
    } else if (received > 0) {
      output = make_scratch_(received);
    }
    const std::byte* input = first().operation ? first().own()->input.data : nullptr;
    Request collective;
    collective.kind = OpKind::kAllToAllSingle;
    for (std::size_t peer = 0; peer < n_; ++peer) {
      collective.inputs.push_back({input, bytes_between(rank_, peer)});
      collective.outputs.push_back({output, bytes_between(peer, rank_)});
      input += bytes_between(rank_, peer);
      output += bytes_between(peer, rank_);
    }
    call_as(collective);
  }

  void reduce_scatter() {
    const TensorSpec& spec = first().spec();
    if (spec.bytes() == 0) {
      return;
    }
    const Scaling scaling = scaling_of(request(), spec.dtype, place_.n_ranks);
    const std::int64_t rows = spec.shape.at(0);
    const std::uint64_t row_elements = spec.elements() / static_cast<std::uint64_t>(rows);
    const auto count_of = [&](std::size_t rank) {
      return static_cast<std::uint64_t>(rows_of(rows, static_cast<int>(rank), place_.n_ranks)) *
             row_elements;
    };
    const NamedOperation::Tensor* own = first().own();
    const std::size_t own_bytes = count_of(rank_) * spec.element_bytes;
    const std::byte* input = own != nullptr ? own->input.data : zeroed(spec.bytes());
    std::byte* output = own != nullptr ? own->output.data : nullptr;
    if (own == nullptr && own_bytes > 0) {
      output = make_scratch_(own_bytes);
    }
    if (own != nullptr && scaling.before != 1.0) {
      std::byte* const scratch = make_scratch_(spec.bytes());
      scale(plan_.before, input, scratch, spec, spec.elements(), scaling.before);
      input = scratch;
    }
    Request collective;
    collective.kind = OpKind::kReduceScatter;
    collective.dtype = spec.dtype;
    collective.op = scaling.op;
    collective.count = count_of(rank_);
    for (std::size_t owner = 0; owner < n_; ++owner) {
      const std::uint64_t count = count_of(owner);
      collective.inputs.push_back({input, count * spec.element_bytes});
      collective.send_counts.push_back(count);
      collective.recv_counts.push_back(collective.count);
      input += count * spec.element_bytes;
    }
    collective.outputs.push_back({output, own_bytes});
    call_as(collective);
    if (own != nullptr && scaling.after != 1.0 && own_bytes > 0) {
      scale(plan_.after, output, output, spec, collective.count, scaling.after);
    }
  }

  const DeviceBatch& batch_;
  const NamedBatchPlace& place_;
  const ScratchMaker make_scratch_;
  const std::size_t n_;
  const std::size_t rank_;
  NamedBatchPlan plan_;
};

}  // namespace

bool is_reduced_on_device(DType dtype, NamedOp op, double prescale, double postscale) {
  if (op == NamedOp::kAdasum || !nccl_dtype(dtype, Float8::kNone)) {
    return false;
  }
  const bool is_scaled = prescale != 1.0 || postscale != 1.0;
  if (is_floating(dtype)) {
    return true;
  }
  if (is_complex(dtype)) {
    return op == NamedOp::kSum || op == NamedOp::kAverage;
  }
  // NCCL adds up 8-bit integers in 8 bits before it divides, and has no average of bool.
  const bool is_wide = element_bytes(dtype) >= 4;
  return !is_scaled && (op != NamedOp::kAverage || is_wide);
}

NamedBatchPlan plan_named_batch(const DeviceBatch& batch, const NamedBatchPlace& place,
                                ScratchMaker make_scratch) {
  return BatchPlanner(batch, place, make_scratch).run();
}

}  // namespace horon
