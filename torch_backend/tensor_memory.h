// Where a tensor lies, and whether it has the memory that its sizes speak of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace horon::torch_backend {

// Contiguous, and neither conjugated nor negated lazily: memory as the engine wants it.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Its first element; null if it has none, whatever its storage says.
inline std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.numel() == 0 ? nullptr : tensor.data_ptr());
}

// Pure. Of a strided tensor: false where its storage has been shrunk, as FSDP does to parameters
// that are not in use.
bool has_memory(const at::Tensor& tensor);

// Throws ValueError unless has_memory().
void check_memory(const at::Tensor& tensor, const char* operation);

}  // namespace horon::torch_backend
