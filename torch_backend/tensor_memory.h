// Whether a tensor has the memory that its sizes speak of.
#pragma once

#include <ATen/ATen.h>

namespace horon::torch_backend {

// Pure. Of a strided tensor: false where its storage has been shrunk, as FSDP does to parameters
// that are not in use.
bool has_memory(const at::Tensor& tensor);

// Throws ValueError unless has_memory().
void check_memory(const at::Tensor& tensor, const char* operation);

}  // namespace horon::torch_backend
