// all_reduce of a sparse COO tensor on the CPU, as DDP has them for embeddings with sparse
// gradients.
//
// The ranks exchange their numbers of elements, then all indices and values, and each adds up the
// same list: bits are identical on all ranks. Half types are added in float32.
#pragma once

#include "collective.h"
#include "dtype_bridge.h"

namespace horon::torch_backend {

// Throws ValueError for a reduction that is not SUM or AVG: absent elements are zeros, of which
// other reductions would make a dense tensor.
Collective sparse_all_reduce(const at::Tensor& tensor, const Reduction& reduction, int n_ranks);

}  // namespace horon::torch_backend
