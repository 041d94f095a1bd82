// From tensors to named operations. What is wrong by itself is a ValueError here.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <vector>

#include "named/named_operation.h"

namespace horon::torch_backend {

using TensorList = std::vector<at::Tensor>;

// What an operation on CUDA tensors has besides; see named_cuda.h.
struct CudaSide;

// A named operation, and the tensors behind it.
class TensorOperation final : public NamedOperation {
 public:
  TensorOperation() = default;
  ~TensorOperation() override;
  TensorOperation(const TensorOperation&) = delete;
  TensorOperation& operator=(const TensorOperation&) = delete;

  Span allocate(std::size_t index, std::int64_t rows) override;
  bool has_come() const override;

  // Writes results into outputs that are not contiguous, and returns what the caller gets. Once,
  // when the operation has succeeded. On a GPU: when the current stream gets there.
  TensorList take_results();
  // Whether the result is one tensor that lies in its place already, so that taking it is no work.
  bool is_in_place() const { return returns_tensor && !cuda && outputs[0].is_same(written[0]); }
  // Requires: is_in_place().
  at::Tensor take_result();

  // Most operations have one tensor.
  using Tensors = c10::SmallVector<at::Tensor, 1>;
  bool returns_tensor = false;  // the caller gets a tensor, not a list
  Tensors inputs;               // contiguous
  Tensors outputs;              // the caller's; made by allocate() where sizes are not known before
  Tensors written;              // contiguous; the same as outputs, or stand-ins
  std::shared_ptr<CudaSide> cuda;  // null for CPU tensors; shared because it is not known here
};

// What a process set looks like from this rank.
struct SetView {
  int id = 0;
  std::vector<int> ranks;  // sorted
  int rank = 0;            // this process's, globally
};

struct Reduced {
  int op = 1;  // Horovod's code
  double prescale = 1.0;
  double postscale = 1.0;
  int priority = 0;
};

using OperationPtr = std::shared_ptr<TensorOperation>;

OperationPtr named_allreduce(const SetView& set, const TensorList& tensors,
                             const TensorList& outputs, const std::vector<std::string>& names,
                             const Reduced& how);
// The same request with a tensor of the same shape and dtype; null if that needs a closer look.
OperationPtr named_allreduce_again(const RequestPtr& request, const at::Tensor& tensor,
                                   const at::Tensor& output);
OperationPtr named_allgather(const SetView& set, const TensorList& tensors,
                             const std::vector<std::string>& names);
OperationPtr named_broadcast(const SetView& set, const at::Tensor& tensor, const at::Tensor& output,
                             int root, const std::string& name);
OperationPtr named_alltoall(const SetView& set, const at::Tensor& tensor,
                            const std::optional<std::vector<std::int64_t>>& splits,
                            const std::string& name);
OperationPtr named_reducescatter(const SetView& set, const TensorList& tensors,
                                 const std::vector<std::string>& names, const Reduced& how);
// Barriers, joins and process sets: nothing but a name.
OperationPtr named_signal(NamedKind kind, int process_set, const std::string& name,
                          const std::vector<int>& ranks = {}, int root = 0);

}  // namespace horon::torch_backend
