#include "own_gradients.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace horon::torch_backend {
namespace {

using torch::autograd::variable_list;

class BeginHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeginHook(std::weak_ptr<OwnGradients> gradients) : gradients_(std::move(gradients)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto own = gradients_.lock()) {
      own->begin_pass();
    }
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const std::weak_ptr<OwnGradients> gradients_;
};

class SeeHook final : public torch::autograd::FunctionPostHook {
 public:
  SeeHook(std::weak_ptr<OwnGradients> gradients, std::size_t parameter)
      : gradients_(std::move(gradients)), parameter_(parameter) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto own = gradients_.lock()) {
      own->see(parameter_);
    }
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const std::weak_ptr<OwnGradients> gradients_;
  const std::size_t parameter_;
};

}  // namespace

OwnGradients::OwnGradients(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)),
      places_(std::make_shared<GradientPlaces>(DdpGradients::kOwn)) {}

OwnGradients::~OwnGradients() {
  for (std::size_t i = 0; i < see_hooks_.size(); ++i) {
    if (auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameters_[i])) {
      accumulator->del_post_hook(see_hooks_[i]);
    }
  }
}

bool OwnGradients::are_shared(const std::vector<at::Tensor>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& parameter) {
    return torch::autograd::impl::grad_accumulator(parameter)->post_hooks().size() > 1;
  });
}

void OwnGradients::watch() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i]);  // DDP's, too
    accumulator->add_pre_hook(std::make_unique<BeginHook>(weak_from_this()));
    see_hooks_.push_back(
        accumulator->add_post_hook(std::make_unique<SeeHook>(weak_from_this(), i)));
  }
}

void OwnGradients::begin_forward() {
  is_in_pass_ = false;  // one that DDP did not reduce
  seen_.clear();
  places_->end_pass();
  before_forward_.clear();
  before_forward_.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) {
    before_forward_.push_back(parameter.grad());
  }
}

void OwnGradients::end_rebuild() {
  const std::vector<at::Tensor> before = std::exchange(before_forward_, {});
  for (std::size_t i = 0; i < before.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (before[i].defined() && gradient.defined() && !gradient.is_same(before[i])) {
      gradient = before[i];
    }
  }
}

const at::Tensor& OwnGradients::separate(std::size_t parameter) {
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  if (gradient.defined() && places_->is_misplaced(parameters_[parameter], gradient)) {
    const c10::AutoGradMode no_graph(false);
    gradient = gradient.clone();
  }
  return gradient;
}

void OwnGradients::begin_pass() {
  if (std::exchange(is_in_pass_, true)) {
    return;
  }
  places_->begin_pass();
  seen_.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    seen_[i] = separate(i);
  }
}

void OwnGradients::see(std::size_t parameter) {
  begin_pass();
  places_->give_way(parameters_[parameter]);
  seen_[parameter] = separate(parameter);
}

void OwnGradients::end_after_backward() {
  // DDP ends the pass in a callback that it has yet to ask for, after its last bucket.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([&engine, weak = weak_from_this()] {
    engine.queue_callback([weak] {
      if (const auto own = weak.lock()) {
        own->end_pass();
      }
    });
  });
}

void OwnGradients::end_pass() {
  const c10::AutoGradMode no_graph(false);
  is_in_pass_ = false;
  places_->end_pass();
  const std::vector<at::Tensor> seen = std::exchange(seen_, {});
  for (std::size_t i = 0; i < seen.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (!gradient.defined() || gradient.is_same(seen[i])) {
      continue;
    }
    if (seen[i].defined()) {
      seen[i].detach().copy_(gradient);
      gradient = seen[i];
    } else {
      gradient = gradient.clone();  // used on another rank
    }
  }
}

}  // namespace horon::torch_backend
