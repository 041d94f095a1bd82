// A c10d backend that does nothing: what a call through torch.distributed costs any backend that is
// not PyTorch's own. Synchronous operations return a null Work, which is the least that c10d
// allows.
#include <torch/csrc/utils/pybind.h>

#include <torch/python.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace py = pybind11;

namespace {

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  // DDP asks for it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  const std::vector<at::Tensor> tensors_;
};

class NoopBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  using c10d::Backend::Backend;

  const std::string getBackendName() const override { return "noop"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("noop");
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return done(o.asyncOp, tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return done(o.asyncOp, tensors);
  }
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions& o) override { return done(o.asyncOp); }
  // DDP compares the ranks' parameters through it before it starts: here all are alike.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& o) override {
    for (at::Tensor& output : outputs.at(0)) {
      output.copy_(inputs.at(0));
    }
    return done(o.asyncOp, outputs.at(0));
  }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return done(o.asyncOp); }
  WorkPtr send(Tensors&, int, int) override { return done(true); }
  WorkPtr recv(Tensors&, int, int) override { return done(true); }

 private:
  static WorkPtr done(bool is_async, const Tensors& tensors = {}) {
    return is_async ? WorkPtr(c10::make_intrusive<DoneWork>(tensors)) : WorkPtr();
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");  // registers the base class
  module.def("create", [](int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<NoopBackend>(rank, size);
  });
}
