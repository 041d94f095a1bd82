#include "sparse_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "copy_into.h"
#include "core/digest.h"
#include "core/error.h"
#include "reduce/reduce.h"

namespace horon::torch_backend {
namespace {

constexpr OpKind kKind = OpKind::kAllReduceSparse;

// What each rank tells the others first. Sizes beyond the eighth are compared by a digest.
struct Summary {
  static constexpr std::size_t kSizes = 8;
  std::int64_t dtype = 0;
  std::int64_t op = 0;
  std::int64_t sparse_dim = 0;
  std::int64_t dim = 0;
  std::array<std::int64_t, kSizes> sizes{};
  std::int64_t digest = 0;
  std::int64_t nnz = 0;
};
static_assert(sizeof(Summary) % sizeof(std::int64_t) == 0);

Summary summary_of(const at::Tensor& tensor, ReduceOp op) {
  Summary summary;
  summary.dtype = static_cast<std::int64_t>(tensor.scalar_type());
  summary.op = static_cast<std::int64_t>(op);
  summary.sparse_dim = tensor.sparse_dim();
  summary.dim = tensor.dim();
  std::uint64_t digest = kEmptyDigest;
  for (std::int64_t d = 0; d < summary.dim; ++d) {
    if (d < static_cast<std::int64_t>(Summary::kSizes)) {
      summary.sizes[static_cast<std::size_t>(d)] = tensor.size(d);
    }
    digest = fold_in(digest, static_cast<std::uint64_t>(tensor.size(d)));
  }
  summary.digest = static_cast<std::int64_t>(digest);
  return summary;
}

// "Float of sizes [10, 3], 1 of them sparse, SUM".
std::string describe(const Summary& summary) {
  const auto shown = std::min<std::size_t>(static_cast<std::size_t>(summary.dim), Summary::kSizes);
  return concat(c10::toString(static_cast<c10::ScalarType>(summary.dtype)), " of sizes ",
                at::IntArrayRef(summary.sizes.data(), shown),
                static_cast<std::size_t>(summary.dim) > shown ? "..., " : ", ", summary.sparse_dim,
                " of them sparse, ", name(static_cast<ReduceOp>(summary.op)));
}

void check_agreement(const std::vector<Summary>& summaries) {
  const auto key = [](const Summary& s) {
    return std::tie(s.dtype, s.op, s.sparse_dim, s.dim, s.sizes, s.digest);
  };
  for (std::size_t rank = 1; rank < summaries.size(); ++rank) {
    if (key(summaries[rank]) != key(summaries[0])) {
      throw MismatchError(concat("all_reduce of a sparse tensor: rank 0 called it with ",
                                 describe(summaries[0]), "; rank ", rank, " with ",
                                 describe(summaries[rank]),
                                 ". Give every rank a tensor of the same dtype and sizes, and the "
                                 "same op. Nothing was changed, and the group can still be used."));
    }
  }
}

// Every rank's `counts[rank]` elements, one rank after another, into `all`.
Request gather(DType dtype, std::uint8_t type_code, std::size_t element_bytes, const ConstSpan& own,
               const PerRank<std::uint64_t>& counts, std::byte* all) {
  Request request;
  request.kind = kKind;
  request.dtype = dtype;
  request.type_code = type_code;
  request.element_bytes = element_bytes;
  request.count = own.bytes / element_bytes;
  request.inputs.assign(counts.size(), own);
  request.send_counts.assign(counts.size(), request.count);
  request.recv_counts = counts;
  for (const std::uint64_t count : counts) {
    const std::size_t bytes = count * element_bytes;
    request.outputs.push_back({bytes == 0 ? nullptr : all, bytes});
    all += bytes;
  }
  return request;
}

// In which values are added up.
c10::ScalarType accumulator(c10::ScalarType type) {
  if (type == c10::ScalarType::Half || type == c10::ScalarType::BFloat16) {
    return c10::ScalarType::Float;
  }
  return type == c10::ScalarType::Bool ? c10::ScalarType::Int : type;
}

// As dense averages: those of integers are truncated towards zero.
void divide(const at::Tensor& values, int64_t n_ranks) {
  if (c10::isIntegralType(values.scalar_type(), false)) {
    values.div_(n_ranks, "trunc");
  } else {
    values.div_(n_ranks);
  }
}

class SparseAllReduce final : public LaterRequests {
 public:
  SparseAllReduce(const at::Tensor& tensor, ReduceOp op, int n_ranks)
      : tensor_(tensor),
        op_(op),
        own_(summary_of(tensor, op)),
        summaries_(static_cast<std::size_t>(n_ranks)) {}

  Request first_request() {
    constexpr std::size_t kWords = sizeof(Summary) / sizeof(std::int64_t);
    return gather(DType::kInt64, 0, sizeof(std::int64_t),
                  {reinterpret_cast<const std::byte*>(&own_), sizeof(Summary)},
                  PerRank<std::uint64_t>(summaries_.size(), kWords),
                  reinterpret_cast<std::byte*>(summaries_.data()));
  }

  void prepare() override {
    const at::NoGradGuard no_grad;
    indices_ = tensor_._indices().contiguous();
    values_ = tensor_._values().contiguous();
    own_.nnz = values_.size(0);
  }

  std::vector<Request> next() override {
    check_agreement(summaries_);
    const at::NoGradGuard no_grad;
    const auto row = static_cast<std::uint64_t>(std::accumulate(
        values_.sizes().begin() + 1, values_.sizes().end(), std::int64_t{1}, std::multiplies<>()));
    PerRank<std::uint64_t> index_counts;
    PerRank<std::uint64_t> value_counts;
    for (const Summary& summary : summaries_) {
      const auto nnz = static_cast<std::uint64_t>(summary.nnz);
      index_counts.push_back(nnz * static_cast<std::uint64_t>(summary.sparse_dim));
      value_counts.push_back(nnz * row);
    }
    std::string refusal;
    try {
      std::vector<int64_t> sizes = values_.sizes().vec();
      sizes[0] = all_nnz();
      all_values_ = at::empty(sizes, values_.options());
      all_indices_ = at::empty({all_nnz() * own_.sparse_dim}, indices_.options());
    } catch (const std::exception& error) {
      refusal = concat("no memory for the elements of all ranks: ", error.what());
    }
    std::vector<Request> requests(2);
    if (refusal.empty()) {
      requests[0] = gather(DType::kInt64, 0, sizeof(std::int64_t), memory_of(indices_),
                           index_counts, static_cast<std::byte*>(all_indices_.data_ptr()));
      requests[1] =
          gather(to_dtype(values_.scalar_type()), static_cast<std::uint8_t>(values_.scalar_type()),
                 values_.element_size(), memory_of(values_), value_counts,
                 static_cast<std::byte*>(all_values_.data_ptr()));
    } else {
      requests[0].kind = kKind;
      requests[0].refusal = refusal;
    }
    return requests;
  }

  void finish() override {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> indices;
    int64_t at = 0;
    for (const Summary& summary : summaries_) {
      const int64_t count = summary.nnz * own_.sparse_dim;
      indices.push_back(all_indices_.narrow(0, at, count).view({own_.sparse_dim, summary.nnz}));
      at += count;
    }
    at::Tensor values = all_values_.to(accumulator(all_values_.scalar_type()));
    at::Tensor sum =
        at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), values, tensor_.sizes()).coalesce();
    if (op_ == ReduceOp::kAvg) {
      divide(sum._values(), static_cast<int64_t>(summaries_.size()));
    }
    values = sum._values().to(values_.scalar_type());
    sum = at::_sparse_coo_tensor_unsafe(sum._indices(), values, tensor_.sizes());
    copy_into(tensor_, sum._coalesced_(true));
  }

 private:
  int64_t all_nnz() const {
    return std::accumulate(summaries_.begin(), summaries_.end(), int64_t{0},
                           [](int64_t sum, const Summary& summary) { return sum + summary.nnz; });
  }

  const at::Tensor tensor_;
  const ReduceOp op_;
  Summary own_;
  std::vector<Summary> summaries_;  // every rank's
  at::Tensor indices_;
  at::Tensor values_;
  at::Tensor all_indices_;
  at::Tensor all_values_;
};

}  // namespace

Collective sparse_all_reduce(const at::Tensor& tensor, const Reduction& reduction, int n_ranks) {
  TORCH_CHECK_VALUE(reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg,
                    "horon: all_reduce of a sparse tensor: expected SUM or AVG, got ",
                    name(reduction.op), ". Call .to_dense() first.");
  const DType dtype = to_dtype(tensor.scalar_type());
  TORCH_CHECK_VALUE(is_reducible(dtype, reduction.op), "horon: all_reduce of a sparse tensor: ",
                    why_not_reducible(dtype, reduction.op));
  const auto later = std::make_shared<SparseAllReduce>(tensor, reduction.op, n_ranks);
  Collective collective;
  collective.requests.push_back(later->first_request());
  collective.later = later;
  collective.device = tensor.device();
  collective.inputs = {tensor};
  collective.outputs = {tensor};
  return collective;
}

}  // namespace horon::torch_backend
