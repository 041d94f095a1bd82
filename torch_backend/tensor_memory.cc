#include "tensor_memory.h"

#include <c10/util/Exception.h>

namespace horon::torch_backend {
namespace {

// From the storage's begin to the end of the last element.
std::size_t bytes_reached(const at::Tensor& tensor) {
  int64_t elements = tensor.numel();
  if (!tensor.is_contiguous()) {
    elements = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      elements += (tensor.size(d) - 1) * tensor.stride(d);
    }
  }
  return static_cast<std::size_t>(tensor.storage_offset() + elements) * tensor.itemsize();
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || !tensor.has_storage() ||
         bytes_reached(tensor) <= tensor.storage().nbytes();
}

void check_memory(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_VALUE(has_memory(tensor), "horon: ", operation, ": a tensor of ",
                    tensor.scalar_type(), " and sizes ", tensor.sizes(), " needs a storage of ",
                    bytes_reached(tensor), " bytes, but its storage has ",
                    tensor.storage().nbytes(),
                    ". Something has shrunk it, as FSDP does to parameters that are not in use.");
}

}  // namespace horon::torch_backend
