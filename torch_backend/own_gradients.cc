#include "own_gradients.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace horon::torch_backend {
namespace {

class BeginHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeginHook(std::weak_ptr<OwnGradients> gradients) : gradients_(std::move(gradients)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (const auto own = gradients_.lock()) {
      own->begin_backward();
    }
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const std::weak_ptr<OwnGradients> gradients_;
};

}  // namespace

OwnGradients::OwnGradients(std::vector<at::Tensor> parameters,
                           std::shared_ptr<GradientPlaces> places)
    : parameters_(std::move(parameters)), places_(std::move(places)) {}

void OwnGradients::watch() {
  for (const at::Tensor& parameter : parameters_) {
    // DDP keeps it.
    torch::autograd::impl::grad_accumulator(parameter)->add_pre_hook(
        std::make_unique<BeginHook>(weak_from_this()));
  }
}

void OwnGradients::begin_forward() {
  before_forward_.clear();
  before_forward_.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) {
    before_forward_.push_back(parameter.grad());
  }
}

void OwnGradients::end_forward() {
  const std::vector<at::Tensor> before = std::exchange(before_forward_, {});
  for (std::size_t i = 0; i < before.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (before[i].defined() && gradient.defined() && !gradient.is_same(before[i])) {
      gradient = before[i];
    }
  }
}

void OwnGradients::begin_backward() {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(graph_task_, graph_task) == graph_task) {
    return;
  }
  places_->begin_pass();
  before_backward_.assign(parameters_.size(), at::Tensor());
  if (!places_->is_lending()) {
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    if (gradient.defined() && !places_->is_in_place(parameters_[i], gradient)) {
      before_backward_[i] = gradient;
    }
  }
}

void OwnGradients::end_after_backward() {
  // A rank that has joined has buckets without a backward pass.
  if (torch::autograd::get_current_graph_task_id() == -1) {
    return;
  }
  // DDP ends the pass in a callback that it has yet to ask for, after its last bucket.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([&engine, weak = weak_from_this()] {
    engine.queue_callback([weak] {
      if (const auto own = weak.lock()) {
        own->end_backward();
      }
    });
  });
}

void OwnGradients::end_backward() {
  const c10::AutoGradMode no_graph(false);
  const std::vector<at::Tensor> before = std::exchange(before_backward_, {});
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (!gradient.defined()) {
      continue;
    }
    const bool has_before = i < before.size() && before[i].defined();
    if (has_before && !gradient.is_same(before[i]) &&
        places_->is_in_place(parameters_[i], gradient)) {
      before[i].copy_(gradient);
      gradient = before[i];
    } else if (at::Tensor own = places_->own_instead_of_view(parameters_[i], gradient);
               own.defined()) {
      gradient = std::move(own);
    }
  }
}

}  // namespace horon::torch_backend
