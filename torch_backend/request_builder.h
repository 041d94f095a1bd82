// From the arguments of c10d's calls to the engine's requests, one function per call.
//
// Errors that no other rank could be waiting for (a sparse tensor, a wrong device, an unknown root)
// are thrown here. Sizes that do not fit together become Request::refusal instead: the rank still
// arrives, and every rank gets the error.
#pragma once

#include <vector>

#include "collective.h"
#include "dtype_bridge.h"

namespace horon::torch_backend {

using TensorList = std::vector<at::Tensor>;

class RequestBuilder {
 public:
  RequestBuilder(int rank, int n_ranks) : rank_(rank), n_ranks_(n_ranks) {}

  Collective barrier(OpKind kind) const;
  // Of a tensor for which is_plain_cpu() holds. A view: the tensor must outlive the request.
  Request all_reduce_in_place(const at::Tensor& tensor, const Reduction& reduction) const;
  Collective all_reduce(OpKind kind, const TensorList& tensors, const Reduction& reduction) const;
  Collective broadcast(const at::Tensor& tensor, int64_t root) const;
  Collective reduce(const at::Tensor& tensor, const Reduction& reduction, int64_t root) const;
  Collective all_gather(const TensorList& outputs, const at::Tensor& input) const;
  // One output, n times the input, for each input.
  Collective all_gather_single(OpKind kind, const TensorList& outputs,
                               const TensorList& inputs) const;
  // `outputs` is empty on ranks other than the root.
  Collective gather(const TensorList& outputs, const at::Tensor& input, int64_t root) const;
  // `output` is undefined on ranks other than the root.
  Collective gather_single(const at::Tensor& output, const at::Tensor& input, int64_t root) const;
  Collective scatter(const at::Tensor& output, const TensorList& inputs, int64_t root) const;
  Collective reduce_scatter(const at::Tensor& output, const TensorList& inputs,
                            const Reduction& reduction) const;
  Collective reduce_scatter_single(OpKind kind, const TensorList& outputs, const TensorList& inputs,
                                   const Reduction& reduction) const;
  Collective all_to_all(const TensorList& outputs, const TensorList& inputs) const;
  // Splits along the first dimension; empty lists mean equal splits.
  Collective all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                               const std::vector<int64_t>& output_splits,
                               const std::vector<int64_t>& input_splits) const;

 private:
  Request start(OpKind kind, const at::Tensor& tensor) const;
  void check_root(OpKind kind, int64_t root) const;
  // Stages what every rank, or the root, gathers.
  void stage_gathered(Collective& collective, Request& request, const TensorList& outputs,
                      const at::Tensor& input) const;
  // Stages what this rank gets of parts like the request's inputs, of which its own may be in
  // place.
  Span stage_own_part(Collective& collective, const Request& request,
                      const at::Tensor& output) const;
  // Whether `part` lies where this rank's is, of as many in `whole` as there are ranks.
  bool is_own_part(const ConstSpan& part, const ConstSpan& whole) const;

  const int rank_;
  const int n_ranks_;
};

}  // namespace horon::torch_backend
