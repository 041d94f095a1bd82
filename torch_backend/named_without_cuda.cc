#ifndef HORON_CUDA

#include <c10/util/Exception.h>

#include "named_cuda.h"

namespace horon::torch_backend {

struct CudaSide {};

namespace {

class NoCuda final : public NamedCuda {
 public:
  std::unique_ptr<DeviceBatches> make_batches(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                              int /*set*/, int /*rank*/, int /*n_ranks*/) override {
    return nullptr;
  }
  void begin(TensorOperation& /*operation*/) override {
    TORCH_INTERNAL_ASSERT(false, "CUDA tensors are refused when their operation is built");
  }
  void run_on(const c10::Stream& /*stream*/) override {}
  void set_default_device(int /*device*/) override {}
};

}  // namespace

std::shared_ptr<NamedCuda> NamedCuda::make() { return std::make_shared<NoCuda>(); }

bool has_come(const CudaSide& /*side*/) { return true; }

void await_on_stream(TensorOperation& /*operation*/) {}

void let_go(TensorOperation& /*operation*/, TensorList& /*results*/) noexcept {}

}  // namespace horon::torch_backend

#endif
