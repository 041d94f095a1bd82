#include "gradient_places.h"

#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "core/allocation_habit.h"
#include "gradient_allocator.h"
#include "gradient_place_table.h"
#ifdef HORON_CUDA
#include "cuda/gradient_cuda_allocator.h"
#endif

namespace horon::torch_backend {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Less is copied in no time, on a CPU.
constexpr std::size_t kLeastBytes = 16 << 10;

using Parameter = GradientPlaceTable::Parameter;
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

GradientPlaceTable& table() {
  // Tensors may be freed at any time: never destroyed.
  static auto* const table = new GradientPlaceTable();
  return *table;
}

// Of the node that stores a parameter's gradient in DDP's bucket: runs after all hooks of the
// parameter.
class PlaceHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit PlaceHook(Parameter parameter) : parameter_(parameter) {}

  variable_list operator()(const variable_list& gradients) override {
    if (gradients.size() != 1) {
      return gradients;
    }
    return {table().settle(parameter_, gradients[0])};
  }

  // In compiled autograd no node runs that a place could be lent to.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const Parameter parameter_;
};

Accumulator accumulator_with_hook(const at::Tensor& parameter) {
  Accumulator accumulator = torch::autograd::impl::grad_accumulator(parameter);
  const auto& hooks = accumulator->pre_hooks();
  const bool has_one = std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const PlaceHook*>(hook.get()) != nullptr;
  });
  if (!has_one) {
    accumulator->add_pre_hook(std::make_unique<PlaceHook>(parameter.unsafeGetTensorImpl()));
  }
  return accumulator;
}

enum class NodeKind {
  kAccumulator,
  kView,  // passes on what it gets, in other sizes and strides
  kOther,
};

NodeKind kind_of_type(const Node& node) {
  static constexpr std::array<std::string_view, 6> kViews{
      "TBackward0",    "TransposeBackward0",  "PermuteBackward0",
      "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"};
  if (dynamic_cast<const AccumulateGrad*>(&node) != nullptr) {
    return NodeKind::kAccumulator;
  }
  const std::string name = c10::demangle(typeid(node).name());
  const bool is_view = std::any_of(kViews.begin(), kViews.end(),
                                   [&](std::string_view view) { return name.ends_with(view); });
  return is_view ? NodeKind::kView : NodeKind::kOther;
}

// By type, since a cast takes as long as an allocation, and the name longer. A model has a dozen.
NodeKind kind_of(const Node& node) {
  thread_local std::vector<std::pair<const std::type_info*, NodeKind>> known;
  const std::type_info* const type = &typeid(node);
  const auto found = std::find_if(known.begin(), known.end(),
                                  [type](const auto& one) { return one.first == type; });
  return found != known.end() ? found->second : known.emplace_back(type, kind_of_type(node)).second;
}

AccumulateGrad* as_accumulator(Node* node) {
  return kind_of(*node) == NodeKind::kAccumulator ? static_cast<AccumulateGrad*>(node) : nullptr;
}

// What stores the result of a node for a parameter; null: something else happens to it.
AccumulateGrad* accumulator_behind(Node* node) {
  for (int depth = 0; node != nullptr && depth < 4; ++depth) {
    const NodeKind kind = kind_of(*node);
    if (kind == NodeKind::kAccumulator) {
      return static_cast<AccumulateGrad*>(node);
    }
    if (kind == NodeKind::kOther || node->num_outputs() != 1) {
      return nullptr;
    }
    node = node->next_edge(0).function.get();
  }
  return nullptr;
}

// Whether it runs in this backward pass: in torch.autograd.grad() the caller gets the gradient.
bool will_run(AccumulateGrad* accumulator) {
  const auto* const nodes = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || nodes->empty()) {
    return true;
  }
  const auto found = nodes->find(accumulator);
  return found != nodes->end() && found->second.needed_;
}

// The node that runs now: whose gradients it makes, and what it has allocated so far.
class RunningNode {
 public:
  struct Made {
    std::size_t bytes;
    int number;  // kLearning: any
    std::weak_ptr<GradientPlace> place;
    int node;
  };
  static constexpr int kLearning = std::numeric_limits<int>::min();

  void come_to(int graph_task, Node* node) {
    if (graph_task == graph_task_ && node == node_) {
      return;
    }
    graph_task_ = graph_task;
    node_ = node;
    made_.clear();
    stores_ = as_accumulator(node);
    add(stores_);
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      add(accumulator_behind(edge.function.get()));
    }
    // The backward pass of a compiled model is one node, which makes all gradients.
    std::sort(made_.begin(), made_.end(), comes_before);
  }

  // The number of an allocation, as a request has it.
  int next(std::size_t bytes) {
    const int number = allocations_.next(graph_task_, node_, bytes);
    return stores_ != nullptr ? -1 - number : number;
  }

  auto made_by(std::size_t bytes, int number) const {
    const auto [first, last] =
        std::equal_range(made_.begin(), made_.end(), Made{bytes, number, {}, 0}, comes_before);
    return std::span<const Made>(first, last);
  }

 private:
  static bool comes_before(const Made& a, const Made& b) {
    return std::pair(a.bytes, a.number) < std::pair(b.bytes, b.number);
  }

  void add(AccumulateGrad* accumulator) {
    if (accumulator != nullptr && accumulator->variable.defined() && will_run(accumulator)) {
      if (auto expected = table().expected(*accumulator, graph_task_); expected.place) {
        made_.push_back(
            {expected.bytes, expected.number.value_or(kLearning), expected.place, expected.node});
      }
    }
  }

  int graph_task_ = -1;
  Node* node_ = nullptr;
  AccumulateGrad* stores_ = nullptr;  // the node, if it stores a gradient
  std::vector<Made> made_;            // sorted
  AllocationCounter allocations_;
};

struct Onlooker {
  std::weak_ptr<GradientPlace> place;
  int node;
  GradientRequest request;
};

thread_local std::vector<Onlooker> onlookers;  // of what is about to be made elsewhere
thread_local bool is_asking = false;           // what is allocated meanwhile is ours

void begin_step_of(GradientPlaces::Owner& owner) {
  struct Asking {
    Asking() { is_asking = true; }
    ~Asking() { is_asking = false; }
  };
  const Asking asking;
  owner.begin_step();
}

// The place, if the request is for its gradient.
c10::DataPtr lend_for(const RunningNode::Made& made, const GradientRequest& request) {
  const std::shared_ptr<GradientPlace> place = made.place.lock();
  if (!place) {
    return {};
  }
  GradientPlaceTable::Answer answer = table().lend(*place, made.node, request);
  if (answer.ask) {
    begin_step_of(*answer.ask);
    answer = table().lend(*place, made.node, request);
  }
  if (!answer.lent && answer.is_onlooker) {
    onlookers.push_back({made.place, made.node, request});
  }
  return std::move(answer.lent);
}

void wrap_allocator(c10::Device device) {
  if (device.is_cpu()) {
    wrap_cpu_allocator();
    return;
  }
#ifdef HORON_CUDA
  wrap_cuda_allocator();
#endif
}

}  // namespace

GradientPlaces::GradientPlaces(std::weak_ptr<Owner> owner) : owner_(std::move(owner)) {}

GradientPlaces::GradientPlaces(DdpGradients gradients) : gradients_(gradients) {}

GradientPlaces::~GradientPlaces() { table().forget(this); }

void GradientPlaces::set(const std::vector<at::Tensor>& parameters,
                         const std::vector<at::Tensor>& parts) {
  wrap_allocator(c10::kCPU);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (parts[i].nbytes() >= kLeastBytes && parameter.is_contiguous() && parameter.is_leaf()) {
      table().set(parameter.unsafeGetTensorImpl(),
                  std::make_shared<GradientPlace>(
                      GradientPlace{.model = this,
                                    .index = i,
                                    .accumulator = accumulator_with_hook(parameter),
                                    .part = parts[i],
                                    .bytes = parts[i].nbytes(),
                                    .loan = std::make_shared<GradientLoan>()}));
    }
  }
}

void GradientPlaces::set(std::size_t index, const at::Tensor& parameter,
                         std::shared_ptr<GradientPack> pack, std::size_t index_in_pack) {
  const at::Tensor part = pack->view(index_in_pack);
  if (part.nbytes() == 0 || !parameter.is_leaf() || parameter.device() != part.device()) {
    return;
  }
  wrap_allocator(part.device());
  std::shared_ptr<GradientLoan> loan = pack->loan(index_in_pack);
  table().set(parameter.unsafeGetTensorImpl(),
              std::make_shared<GradientPlace>(
                  GradientPlace{.model = this,
                                .index = index,
                                .accumulator = torch::autograd::impl::grad_accumulator(parameter),
                                .pack = std::move(pack),
                                .index_in_pack = index_in_pack,
                                .bytes = part.nbytes(),
                                .device = part.device(),
                                .loan = std::move(loan)}));
}

void GradientPlaces::begin_pass() const { table().begin_pass(this); }

bool GradientPlaces::is_misplaced(const at::Tensor& parameter, const at::Tensor& gradient) const {
  return table().is_misplaced(this, parameter.unsafeGetTensorImpl(), gradient);
}

void GradientPlaces::end_pass() const { table().end_pass(this); }

void GradientPlaces::give_way(const at::Tensor& parameter) const {
  table().give_way(this, parameter.unsafeGetTensorImpl());
}

bool may_have_place(std::size_t bytes, c10::DeviceType type) {
  return table().may_have_size(bytes, type);
}

c10::DataPtr lend_place(std::size_t bytes, c10::Device device) {
  if (is_asking) {
    return {};
  }
  onlookers.clear();
  if (c10::GradMode::is_enabled()) {
    return {};
  }
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return {};
  }
  static thread_local RunningNode running;
  const int graph_task = torch::autograd::get_current_graph_task_id();
  running.come_to(graph_task, node.get());
  const GradientRequest request{bytes, device, graph_task, running.next(bytes)};
  for (const int number : {request.number, RunningNode::kLearning}) {
    for (const RunningNode::Made& made : running.made_by(bytes, number)) {
      if (c10::DataPtr lent = lend_for(made, request)) {
        onlookers.clear();
        return lent;
      }
    }
  }
  return {};
}

void made_elsewhere(const void* address) {
  if (is_asking) {
    return;
  }
  for (const Onlooker& onlooker : onlookers) {
    if (const std::shared_ptr<GradientPlace> place = onlooker.place.lock()) {
      table().see(*place, onlooker.node, onlooker.request, address);
    }
  }
  onlookers.clear();
}

void note_stored(const at::Tensor& parameter) {
  table().learn(parameter.unsafeGetTensorImpl(), parameter.grad());
}

c10::Storage leave_place(GradientLoan& loan) { return table().leave(loan); }

void forsake_places(const GradientPack& pack) { table().forsake(pack); }

}  // namespace horon::torch_backend
