// One collective as the engine sees it: what a rank brings, and where the result goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "core/inline_vector.h"
#include "core/op_kind.h"
#include "core/reduce_op.h"
#include "core/tensor_pieces.h"

namespace horon {

// A view of contiguous memory that somebody else owns.
struct Span {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

struct ConstSpan {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// One value for each rank; no allocation up to eight ranks.
template <typename T>
using PerRank = InlineVector<T, 8>;

struct Request;

// Which operation of which rank, for messages.
struct OperationName {
  const Request* request = nullptr;
  std::uint64_t number = 0;  // in its group
  int rank = 0;
  int n_ranks = 1;
};

// Ownership: a Request only points at tensors; whoever executes it keeps them alive.
//
// Which vectors are filled depends on pattern(kind); n is the number of ranks:
//   kNone           nothing
//   kReduceToAll    inputs[0], outputs[0]: `count` elements each (they may be the same memory);
//                   with `pieces`, they say only how long the tensor is
//   kReduceToRoot   inputs[0]; outputs[0] on the root
//   kReduceScatter  inputs[d] for every destination d, outputs[0] for what this rank owns;
//                   send_counts[d], recv_counts[s] in elements
//   kExchange       inputs[d], outputs[s]: empty spans where nothing moves;
//                   send_counts[d], recv_counts[s] in elements
struct Request {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  // torch's own code of the element type. Compared too, since opaque types share one DType.
  std::uint8_t type_code = 0;
  std::size_t element_bytes = 1;
  int root = 0;
  std::uint64_t count = 0;  // elements of the tensor the caller named
  double factor = 1.0;      // PREMUL_SUM only
  // Digest of the shapes of the whole coalesced call, so that it fails before its first part runs.
  // Where has_window(kind): the window's number in its group.
  std::uint64_t batch_digest = 0;
  // Reductions to all: so many bytes more of the work this rank takes than one without a lead,
  // because it would wait for the others later. Ranks may differ.
  std::uint32_t lead_bytes = 0;
  bool monitor_all_ranks = false;  // monitored_barrier(wait_all_ranks=True)
  PerRank<ConstSpan> inputs;
  PerRank<Span> outputs;
  PerRank<std::uint64_t> send_counts;
  PerRank<std::uint64_t> recv_counts;
  // Where the tensor lies if not in one piece; see Transport::takes_pieces. Each rank's own affair.
  const TensorPieces* pieces = nullptr;
  // Not empty: this rank found its own arguments wrong. It still arrives, so that the others get an
  // error that says so instead of waiting for a rank that will never come.
  std::string refusal;
  // Of a part of another operation: which one, for messages. Null: none.
  const OperationName* whole = nullptr;
};

// Calls visit(input, output, bytes) for each part of the tensor's bytes [begin, begin + bytes), in
// order. Requires a reduction to all, or to a root (where `output` means something only on the
// root).
template <typename Visit>
void visit_tensor(const Request& request, std::uint64_t begin, std::uint64_t bytes,
                  const Visit& visit) {
  if (request.pieces != nullptr) {
    request.pieces->visit(begin, bytes, visit);
  } else if (bytes > 0) {
    std::byte* output = request.outputs.empty() ? nullptr : request.outputs[0].data;
    visit(request.inputs[0].data + begin, output == nullptr ? nullptr : output + begin, bytes);
  }
}

}  // namespace horon
