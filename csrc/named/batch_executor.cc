#include "named/batch_executor.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/round_up.h"
#include "named/adasum.h"
#include "reduce/reduce.h"

namespace horon {
namespace {

// Tensors lie in the buffer on such boundaries.
constexpr std::size_t kAlignment = 64;
// What a buffer is grown to at least.
constexpr std::size_t kFirstBufferBytes = std::size_t{256} << 10;

// The room of so many bytes in the buffer.
std::size_t room_of(std::size_t bytes) { return round_up(bytes, kAlignment); }

ReduceOp transport_op(NamedOp op) {
  switch (op) {
    case NamedOp::kAverage:
      return ReduceOp::kAvg;
    case NamedOp::kMin:
      return ReduceOp::kMin;
    case NamedOp::kMax:
      return ReduceOp::kMax;
    case NamedOp::kProduct:
      return ReduceOp::kProduct;
    default:
      return ReduceOp::kSum;
  }
}

// A sum scales its terms while it adds them, which saves a pass and a rounding.
bool scales_in_transport(const NamedRequest& request) {
  return request.op == NamedOp::kSum && request.prescale != 1.0;
}

double factor_before(const NamedRequest& request) {
  return scales_in_transport(request) ? 1.0 : request.prescale;
}

// An average of integers that is scaled is divided and scaled at once, which loses less, as
// Horovod does.
bool averages_afterwards(const NamedRequest& request, const TensorSpec& spec) {
  return request.op == NamedOp::kAverage && request.postscale != 1.0 && is_integer(spec.dtype);
}

// `to` may be `from`.
void copy_scaled(std::byte* to, const std::byte* from, std::uint64_t count, const TensorSpec& spec,
                 double factor) {
  if (factor == 1.0) {
    if (to != from && count > 0) {
      std::memcpy(to, from, count * spec.element_bytes);
    }
    return;
  }
  const void* source = from;
  reduce(to, &source, 1, count, spec.dtype, ReduceOp::kPremulSum, &factor);
}

// Bytes of one row of a tensor whose first dimension differs from rank to rank.
std::uint64_t row_bytes(const TensorSpec& spec) { return spec.bytes(); }

std::vector<std::int64_t> own_rows(const std::vector<BatchTensor>& batch) {
  std::vector<std::int64_t> rows;
  rows.reserve(batch.size());
  for (const BatchTensor& tensor : batch) {
    rows.push_back(tensor.operation ? tensor.operation->rows[tensor.tensor] : 0);
  }
  return rows;
}

}  // namespace

BatchExecutor::BatchExecutor(std::shared_ptr<ProcessSetLane> lane, int rank, int n_ranks,
                             BufferFactory make_buffer)
    : lane_(std::move(lane)),
      rank_(rank),
      n_ranks_(n_ranks),
      make_buffer_(std::move(make_buffer)) {}

std::byte* BatchExecutor::buffer(std::size_t bytes) {
  if (bytes > buffer_bytes_) {
    const std::size_t wanted = std::max({bytes, 2 * buffer_bytes_, kFirstBufferBytes});
    buffer_.reset();
    buffer_bytes_ = 0;
    buffer_ = make_buffer_(wanted);
    buffer_bytes_ = wanted;
  }
  return buffer_.get();
}

void BatchExecutor::run(const std::vector<BatchTensor>& batch, int root,
                        const WaitContext& context) {
  const BatchTensor& first = batch.front();
  if (first.request->device == DeviceKind::kCuda) {
    run_on_device(batch, root, context);
    return;
  }
  switch (first.request->kind) {
    case NamedKind::kAllReduce:
      if (first.request->op == NamedOp::kAdasum) {
        for (const BatchTensor& tensor : batch) {
          adasum(tensor, context);
        }
      } else {
        batch.size() == 1 ? all_reduce_alone(first, context) : all_reduce(batch, context);
      }
      return;
    case NamedKind::kAllGather:
      all_gather(batch, context);
      return;
    case NamedKind::kBroadcast:
      broadcast(first, root, context);
      return;
    case NamedKind::kAllToAll:
      all_to_all(first, context);
      return;
    case NamedKind::kReduceScatter:
      reduce_scatter(first, context);
      return;
    default:
      throw Error(concat("a batch of ", name(first.request->kind), " cannot be run"));
  }
}

Request BatchExecutor::reduction(OpKind kind, const BatchTensor& like, std::uint64_t count) const {
  Request request;
  request.kind = kind;
  request.dtype = like.spec().dtype;
  request.type_code = like.spec().type_code;
  request.element_bytes = like.spec().element_bytes;
  request.op = averages_afterwards(*like.request, like.spec()) ? ReduceOp::kSum
                                                               : transport_op(like.request->op);
  if (scales_in_transport(*like.request)) {
    request.op = ReduceOp::kPremulSum;
    request.factor = like.request->prescale;
  }
  request.count = count;
  return request;
}

double BatchExecutor::factor_after(const BatchTensor& tensor) const {
  const double postscale = tensor.request->postscale;
  return averages_afterwards(*tensor.request, tensor.spec()) ? postscale / n_ranks_ : postscale;
}

void BatchExecutor::all_reduce_alone(const BatchTensor& tensor, const WaitContext& context) {
  const TensorSpec& spec = tensor.spec();
  const std::uint64_t count = spec.elements();
  if (count == 0) {
    return;
  }
  Request request = reduction(OpKind::kAllReduce, tensor, count);
  const NamedOperation::Tensor* own = tensor.own();
  const std::byte* input = own != nullptr ? own->input.data : nullptr;
  std::byte* output = own != nullptr ? own->output.data : buffer(spec.bytes());
  if (own == nullptr) {
    std::memset(output, 0, spec.bytes());
    input = output;
  }
  if (const double factor = factor_before(*tensor.request); factor != 1.0) {
    copy_scaled(output, input, count, spec, factor);
    input = output;
  }
  request.inputs.push_back({input, spec.bytes()});
  request.outputs.push_back({output, spec.bytes()});
  lane_->transport().run(request, context);
  copy_scaled(output, output, count, spec, factor_after(tensor));
}

bool BatchExecutor::may_leave(const std::vector<BatchTensor>& batch) const {
  const BatchTensor& first = batch.front();
  const NamedRequest& request = *first.request;
  const NamedOperation::Tensor* own = first.own();
  return batch.size() == 1 && own != nullptr && request.kind == NamedKind::kAllReduce &&
         request.op != NamedOp::kAdasum && request.device == DeviceKind::kCpu &&
         own->input.data == own->output.data && first.spec().elements() > 0 &&
         factor_before(request) == 1.0 && factor_after(first) == 1.0;
}

Transport::Leaving BatchExecutor::run_and_leave(const BatchTensor& tensor, std::uint32_t lead_bytes,
                                                const WaitContext& context) {
  const TensorSpec& spec = tensor.spec();
  Request request = reduction(OpKind::kAllReduce, tensor, spec.elements());
  request.inputs.push_back({tensor.own()->input.data, spec.bytes()});
  request.outputs.push_back({tensor.own()->output.data, spec.bytes()});
  request.lead_bytes = lead_bytes;
  return lane_->transport().run_and_leave(request, context);
}

void BatchExecutor::run_in_parts(const BatchTensor& tensor, const WaitContext& context) {
  const TensorSpec& spec = tensor.spec();
  const std::uint64_t bytes = spec.bytes();
  const NamedOperation::Tensor* own = tensor.own();
  PartMaker* const maker = own != nullptr ? tensor.operation->maker.get() : nullptr;
  std::byte* const data = own != nullptr ? own->output.data : buffer(bytes);
  if (own == nullptr) {
    std::memset(data, 0, bytes);
  } else if (own->input.data != own->output.data) {
    std::memcpy(data, own->input.data, bytes);
  }
  for (std::uint64_t begin = 0; begin < bytes; begin += kPartBytes) {
    const std::uint64_t part = std::min<std::uint64_t>(kPartBytes, bytes - begin);
    if (maker != nullptr && maker->is_mine()) {
      maker->make_until(begin + part);
    }
    Request request = reduction(OpKind::kAllReduce, tensor, part / spec.element_bytes);
    request.inputs.push_back({data + begin, part});
    request.outputs.push_back({data + begin, part});
    lane_->transport().run(request, context);
  }
}

bool BatchExecutor::gather_pieces(const std::vector<BatchTensor>& batch, std::uint64_t bytes) {
  const NamedRequest& like = *batch.front().request;
  if (factor_before(like) != 1.0 || like.postscale != 1.0 ||
      !lane_->transport().takes_pieces(bytes)) {
    return false;
  }
  pieces_.clear();
  for (const BatchTensor& tensor : batch) {
    const NamedOperation::Tensor* own = tensor.own();
    if (own == nullptr) {
      return false;
    }
    pieces_.add(own->input.data, own->output.data, tensor.spec().bytes());
  }
  return pieces_.are_apart();
}

void BatchExecutor::all_reduce(const std::vector<BatchTensor>& batch, const WaitContext& context) {
  const NamedRequest& like = *batch.front().request;
  std::uint64_t count = 0;
  for (const BatchTensor& tensor : batch) {
    count += tensor.spec().elements();
  }
  if (count == 0) {
    return;
  }
  Request request = reduction(OpKind::kAllReduce, batch.front(), count);
  const std::size_t bytes = count * request.element_bytes;
  if (gather_pieces(batch, bytes)) {
    request.inputs.push_back({nullptr, bytes});
    request.outputs.push_back({nullptr, bytes});
    request.pieces = &pieces_;
    lane_->transport().run(request, context);
    return;
  }
  std::byte* const packed = buffer(bytes);
  std::byte* at = packed;
  for (const BatchTensor& tensor : batch) {
    const TensorSpec& spec = tensor.spec();
    if (const NamedOperation::Tensor* own = tensor.own()) {
      copy_scaled(at, own->input.data, spec.elements(), spec, factor_before(like));
    } else {
      std::memset(at, 0, spec.bytes());
    }
    at += spec.bytes();
  }
  request.inputs.push_back({packed, bytes});
  request.outputs.push_back({packed, bytes});
  lane_->transport().run(request, context);
  at = packed;
  for (const BatchTensor& tensor : batch) {
    const TensorSpec& spec = tensor.spec();
    if (const NamedOperation::Tensor* own = tensor.own()) {
      copy_scaled(own->output.data, at, spec.elements(), spec, factor_after(tensor));
    }
    at += spec.bytes();
  }
}

std::vector<std::int64_t> BatchExecutor::gather_numbers(const std::vector<std::int64_t>& numbers,
                                                        const WaitContext& context) {
  const std::size_t n = static_cast<std::size_t>(n_ranks_);
  const std::size_t bytes = numbers.size() * sizeof(std::int64_t);
  std::vector<std::int64_t> all(n * numbers.size());
  Request request;
  request.kind = OpKind::kAllGatherSingle;
  request.dtype = DType::kInt64;
  request.element_bytes = sizeof(std::int64_t);
  request.count = numbers.size();
  request.inputs.resize(n, {reinterpret_cast<const std::byte*>(numbers.data()), bytes});
  request.send_counts.resize(n, numbers.size());
  request.recv_counts.resize(n, numbers.size());
  for (std::size_t rank = 0; rank < n; ++rank) {
    request.outputs.push_back(
        {reinterpret_cast<std::byte*>(all.data() + rank * numbers.size()), bytes});
  }
  lane_->transport().run(request, context);
  return all;
}

void BatchExecutor::all_gather(const std::vector<BatchTensor>& batch, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks_);
  const std::vector<std::int64_t> rows =
      gather_numbers(own_rows(batch), context);  // [rank][tensor]
  Request request;
  request.kind = OpKind::kAllGather;
  request.dtype = DType::kUInt8;
  request.element_bytes = 1;
  request.recv_counts.resize(n, 0);
  std::uint64_t received = 0;
  std::vector<std::int64_t> all_rows(batch.size(), 0);
  for (std::size_t rank = 0; rank < n; ++rank) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const std::int64_t count = rows[rank * batch.size() + i];
      all_rows[i] += count;
      request.recv_counts[rank] += static_cast<std::uint64_t>(count) * row_bytes(batch[i].spec());
    }
    received += request.recv_counts[rank];
  }
  request.count = request.recv_counts[static_cast<std::size_t>(rank_)];
  request.send_counts.resize(n, request.count);
  std::vector<Span> outputs;
  outputs.reserve(batch.size());
  for (std::size_t i = 0; i < batch.size(); ++i) {
    outputs.push_back(
        batch[i].operation ? batch[i].operation->allocate(batch[i].tensor, all_rows[i]) : Span{});
  }
  // One tensor goes straight from and to its place; several through the buffer.
  const bool is_direct = batch.size() == 1 && batch[0].operation != nullptr;
  std::byte* const packed = is_direct ? nullptr : buffer(room_of(request.count) + received);
  std::byte* received_at = is_direct ? outputs[0].data : packed + room_of(request.count);
  if (!is_direct) {
    std::byte* at = packed;
    for (const BatchTensor& tensor : batch) {
      const NamedOperation::Tensor* own = tensor.own();
      if (own != nullptr && own->input.bytes > 0) {
        std::memcpy(at, own->input.data, own->input.bytes);
        at += own->input.bytes;
      }
    }
  }
  const ConstSpan input{is_direct ? batch[0].own()->input.data : packed, request.count};
  request.inputs.resize(n, input);
  for (std::size_t rank = 0; rank < n; ++rank) {
    request.outputs.push_back({received_at, request.recv_counts[rank]});
    received_at += request.recv_counts[rank];
  }
  lane_->transport().run(request, context);
  if (is_direct) {
    return;
  }
  const std::byte* from = packed + room_of(request.count);
  for (std::size_t rank = 0; rank < n; ++rank) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const std::size_t bytes =
          static_cast<std::uint64_t>(rows[rank * batch.size() + i]) * row_bytes(batch[i].spec());
      if (batch[i].operation && bytes > 0) {
        std::memcpy(outputs[i].data, from, bytes);
        outputs[i].data += bytes;
      }
      from += bytes;
    }
  }
}

void BatchExecutor::broadcast(const BatchTensor& tensor, int root, const WaitContext& context) {
  const TensorSpec& spec = tensor.spec();
  const auto n = static_cast<std::size_t>(n_ranks_);
  if (spec.bytes() == 0) {
    return;
  }
  Request request;
  request.kind = OpKind::kBroadcast;
  request.dtype = spec.dtype;
  request.type_code = spec.type_code;
  request.element_bytes = spec.element_bytes;
  request.count = spec.elements();
  request.root = root;
  request.inputs.resize(n);
  request.outputs.resize(n);
  request.send_counts.resize(n, 0);
  request.recv_counts.resize(n, 0);
  const NamedOperation::Tensor* own = tensor.own();
  if (rank_ == root) {
    for (std::size_t rank = 0; rank < n; ++rank) {
      if (static_cast<int>(rank) != rank_) {
        request.inputs[rank] = own->input;
        request.send_counts[rank] = request.count;
      }
    }
  } else {
    const auto from = static_cast<std::size_t>(root);
    request.outputs[from] = own != nullptr ? own->output : Span{buffer(spec.bytes()), spec.bytes()};
    request.recv_counts[from] = request.count;
  }
  lane_->transport().run(request, context);
  if (rank_ == root && own->output.data != own->input.data) {
    std::memcpy(own->output.data, own->input.data, own->input.bytes);
  }
}

void BatchExecutor::all_to_all(const BatchTensor& tensor, const WaitContext& context) {
  const auto n = static_cast<std::size_t>(n_ranks_);
  const std::uint64_t row = row_bytes(tensor.spec());
  const std::vector<std::int64_t> none(n, 0);
  const std::vector<std::int64_t>& splits = tensor.operation ? tensor.operation->splits : none;
  const std::vector<std::int64_t> all = gather_numbers(splits, context);  // [source][destination]
  Request request;
  request.kind = OpKind::kAllToAllSingle;
  request.dtype = DType::kUInt8;
  request.element_bytes = 1;
  const NamedOperation::Tensor* own = tensor.own();
  const std::byte* input = own != nullptr ? own->input.data : nullptr;
  std::vector<std::int64_t> received(n);
  std::int64_t rows = 0;
  for (std::size_t source = 0; source < n; ++source) {
    received[source] = all[source * n + static_cast<std::size_t>(rank_)];
    rows += received[source];
  }
  const std::size_t output_bytes = static_cast<std::uint64_t>(rows) * row;
  std::byte* output =
      own != nullptr ? tensor.operation->allocate(tensor.tensor, rows).data : buffer(output_bytes);
  for (std::size_t rank = 0; rank < n; ++rank) {
    const std::uint64_t sent = static_cast<std::uint64_t>(splits[rank]) * row;
    const std::uint64_t coming = static_cast<std::uint64_t>(received[rank]) * row;
    request.inputs.push_back({input, sent});
    request.outputs.push_back({output, coming});
    request.send_counts.push_back(sent);
    request.recv_counts.push_back(coming);
    request.count += sent;
    input += sent;
    output += coming;
  }
  lane_->transport().run(request, context);
  if (tensor.operation) {
    tensor.operation->received_splits = std::move(received);
  }
}

void BatchExecutor::reduce_scatter(const BatchTensor& tensor, const WaitContext& context) {
  const TensorSpec& spec = tensor.spec();
  const auto n = static_cast<std::size_t>(n_ranks_);
  if (spec.bytes() == 0) {
    return;
  }
  const std::int64_t rows = spec.shape.at(0);
  const std::uint64_t row_elements = spec.elements() / static_cast<std::uint64_t>(rows);
  Request request = reduction(OpKind::kReduceScatter, tensor, spec.elements());
  const NamedOperation::Tensor* own = tensor.own();
  const std::uint64_t own_count =
      static_cast<std::uint64_t>(rows_of(rows, rank_, n_ranks_)) * row_elements;
  const std::size_t own_bytes = own_count * spec.element_bytes;
  const std::byte* input = own != nullptr ? own->input.data : nullptr;
  std::byte* output = own != nullptr ? own->output.data : nullptr;
  const double factor = factor_before(*tensor.request);
  const bool scales_first = own != nullptr && factor != 1.0;
  if (own == nullptr || scales_first) {
    std::byte* const scratch = buffer(room_of(spec.bytes()) + own_bytes);
    own == nullptr ? static_cast<void>(std::memset(scratch, 0, spec.bytes()))
                   : copy_scaled(scratch, input, spec.elements(), spec, factor);
    input = scratch;
    output = own != nullptr ? output : scratch + room_of(spec.bytes());
  }
  for (std::size_t rank = 0; rank < n; ++rank) {
    const std::uint64_t count =
        static_cast<std::uint64_t>(rows_of(rows, static_cast<int>(rank), n_ranks_)) * row_elements;
    request.inputs.push_back({input, count * spec.element_bytes});
    request.send_counts.push_back(count);
    request.recv_counts.push_back(own_count);
    input += count * spec.element_bytes;
  }
  request.outputs.push_back({output, own_bytes});
  lane_->transport().run(request, context);
  copy_scaled(output, output, own_count, spec, factor_after(tensor));
}

void BatchExecutor::adasum(const BatchTensor& tensor, const WaitContext& context) {
  const TensorSpec& spec = tensor.spec();
  const auto n = static_cast<std::size_t>(n_ranks_);
  const std::uint64_t count = spec.elements();
  if (count == 0) {
    return;
  }
  std::byte* const all = buffer((n + 1) * room_of(spec.bytes()));
  std::byte* const contribution = all + n * room_of(spec.bytes());
  const NamedOperation::Tensor* own = tensor.own();
  if (own != nullptr) {
    copy_scaled(contribution, own->input.data, count, spec, tensor.request->prescale);
  } else {
    std::memset(contribution, 0, spec.bytes());
  }
  Request request;
  request.kind = OpKind::kAllGatherSingle;
  request.dtype = spec.dtype;
  request.type_code = spec.type_code;
  request.element_bytes = spec.element_bytes;
  request.count = count;
  request.inputs.resize(n, {contribution, spec.bytes()});
  request.send_counts.resize(n, count);
  request.recv_counts.resize(n, count);
  std::vector<std::byte*> parts;
  for (std::size_t rank = 0; rank < n; ++rank) {
    parts.push_back(all + rank * room_of(spec.bytes()));
    request.outputs.push_back({parts.back(), spec.bytes()});
  }
  lane_->transport().run(request, context);
  combine_adasum(parts, count, spec.dtype);
  if (own != nullptr) {
    copy_scaled(own->output.data, parts[0], count, spec, tensor.request->postscale);
  }
}

// Ranks that have joined may have no device; all have to know before one of them waits on its own.
void BatchExecutor::require_device(const WaitContext& context) {
  if (!has_asked_for_devices_) {
    DeviceBatches* const device = lane_->device_batches();
    const std::string refusal = device != nullptr ? device->refusal() : "no GPU parts in horon";
    const std::vector<std::int64_t> all = gather_numbers({refusal.empty() ? 1 : 0}, context);
    has_asked_for_devices_ = true;
    const auto without = std::find(all.begin(), all.end(), 0);
    if (without != all.end()) {
      no_device_ = concat("rank ", without - all.begin(),
                          " of the process set can not take part in operations of CUDA tensors: it "
                          "sees no GPU, or its horon was built without the GPU parts.");
    }
  }
  if (!no_device_.empty()) {
    throw MismatchError(no_device_);
  }
}

void BatchExecutor::run_on_device(const std::vector<BatchTensor>& batch, int root,
                                  const WaitContext& context) {
  require_device(context);
  const BatchTensor& first = batch.front();
  DeviceBatch work{batch, root, {}};
  const auto n = static_cast<std::size_t>(n_ranks_);
  if (first.request->kind == NamedKind::kAllGather) {
    work.numbers = gather_numbers(own_rows(batch), context);
  } else if (first.request->kind == NamedKind::kAllToAll) {
    work.numbers = gather_numbers(
        first.operation ? first.operation->splits : std::vector<std::int64_t>(n, 0), context);
    if (first.operation) {
      first.operation->received_splits.resize(n);
      for (std::size_t source = 0; source < n; ++source) {
        first.operation->received_splits[source] =
            work.numbers[source * n + static_cast<std::size_t>(rank_)];
      }
    }
  }
  lane_->device_batches()->run(work, context);
}

}  // namespace horon
