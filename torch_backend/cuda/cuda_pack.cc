#include "cuda/cuda_pack.h"

#include <c10/cuda/CUDAGuard.h>

#include "cuda/fusion_policy.h"
#include "cuda/pack_kernels.h"
#include "dtype_bridge.h"
#include "errors.h"

namespace horon::torch_backend {

void pack_on_device(PackDirection direction, const std::vector<at::Tensor>& tensors,
                    const at::Tensor& buffer, double factor) {
  TORCH_CHECK_VALUE(buffer.is_cuda() && buffer.is_contiguous(),
                    "horon: cuda_pack: expected a contiguous CUDA buffer, got one on ",
                    buffer.device(), ".");
  std::vector<PackTensor> parts;
  std::uint64_t end = 0;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device() == buffer.device() && tensor.is_contiguous() &&
                          tensor.scalar_type() == buffer.scalar_type(),
                      "horon: cuda_pack: expected contiguous tensors of ", buffer.scalar_type(),
                      " on ", buffer.device(), ", got one of ", tensor.scalar_type(), " on ",
                      tensor.device(), tensor.is_contiguous() ? "." : ", not contiguous.");
    PackTensor part;
    part.address = reinterpret_cast<std::uint64_t>(tensor.data_ptr());
    part.buffer_offset = (end + kFusionAlignment - 1) / kFusionAlignment * kFusionAlignment;
    part.elements = static_cast<std::uint64_t>(tensor.numel());
    part.dtype = to_dtype(tensor.scalar_type());
    part.buffer_dtype = part.dtype;
    end = part.buffer_offset + tensor.nbytes();
    parts.push_back(part);
  }
  TORCH_CHECK_VALUE(end <= buffer.nbytes(), "horon: cuda_pack: the tensors need ", end,
                    " bytes of the buffer, which has ", buffer.nbytes(), ".");
  try {
    const c10::cuda::CUDAGuard guard(buffer.device());
    launch_pack(
        plan_pack(direction, parts, reinterpret_cast<std::uint64_t>(buffer.data_ptr()), factor),
        c10::cuda::getCurrentCUDAStream().stream());
  } catch (...) {
    rethrow_translated();
  }
}

}  // namespace horon::torch_backend
