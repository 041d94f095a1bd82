#include "gradient_places.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "gradient_allocator.h"
#include "process_arena.h"

namespace horon::torch_backend {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Less is copied in no time.
constexpr std::size_t kLeastBytes = 16 << 10;
constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

using Parameter = const c10::TensorImpl*;
using Memory = std::shared_ptr<void>;

using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

struct Place {
  const GradientPlaces* model = nullptr;
  Accumulator accumulator;  // has the hook
  at::Tensor part;          // of the bucket
  void* address = nullptr;
  std::size_t bytes = 0;
};

// Whether nobody else holds its memory. A view holds the tensor that it was made of.
bool is_only_owner(const at::Tensor& gradient) {
  if (gradient.use_count() != 1) {
    return false;
  }
  const auto* const meta = torch::autograd::impl::get_view_autograd_meta(gradient);
  if (meta == nullptr) {
    return gradient.storage().use_count() == 1;
  }
  const bool has_one_base = meta->shared_view_info() || meta->has_bw_view() != meta->has_fw_view();
  if (!has_one_base) {
    return false;
  }
  const auto& view = meta->has_bw_view() ? meta->get_backward_view() : meta->get_forward_view();
  return view.base_.use_count() == 1 && gradient.storage().use_count() == 2;
}

// Whether the gradient is the only thing at the place and may become a view of it.
bool is_alone_in(const Place& place, const at::Tensor& gradient) {
  return gradient.defined() && gradient.is_cpu() && gradient.layout() == c10::kStrided &&
         gradient.has_storage() && gradient.const_data_ptr() == place.address &&
         is_only_owner(gradient) && gradient.scalar_type() == place.part.scalar_type() &&
         gradient.sizes() == place.part.sizes() && gradient.strides() == place.part.strides() &&
         !gradient.is_conj() && !gradient.is_neg() && !gradient.requires_grad();
}

// All places of this process. Thread safety: all methods.
class Table {
 public:
  void set(const GradientPlaces* model, Parameter parameter, Accumulator accumulator,
           const at::Tensor& part) {
    Place place{model, std::move(accumulator), part, part.data_ptr(), part.nbytes()};
    const std::lock_guard lock(mutex_);
    std::swap(places_[parameter], place);  // the old one dies after the lock
    count();
  }

  void forget(const GradientPlaces* model) {
    std::vector<Place> dying;
    std::vector<Memory> memory;
    const std::lock_guard lock(mutex_);
    for (auto it = places_.begin(); it != places_.end();) {
      if (it->second.model == model) {
        dying.push_back(std::move(it->second));
        it = places_.erase(it);
      } else {
        ++it;
      }
    }
    std::erase_if(misfits_, [model](const auto& misfit) { return misfit.first == model; });
    if (const auto found = left_behind_.find(model); found != left_behind_.end()) {
      memory = std::move(found->second);
      left_behind_.erase(found);
    }
    count();
  }

  std::size_t least_bytes() const { return least_.load(std::memory_order_relaxed); }

  bool has_size(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    return sizes_.contains(bytes);
  }

  void* lend(const AccumulateGrad* accumulator, std::size_t bytes) {
    const at::Tensor& parameter = accumulator->variable;
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(parameter.unsafeGetTensorImpl());
    if (found == places_.end()) {
      return nullptr;
    }
    const Place& place = found->second;
    if (!place.model->is_lending() || place.bytes != bytes ||
        place.accumulator.get() != accumulator || parameter.grad().defined() ||
        lent_.contains(place.address) || misfits_.contains({place.model, bytes}) ||
        !is_in_arena(place.address)) {
      return nullptr;
    }
    lent_[place.address] = std::make_shared<c10::Storage>(place.part.storage());
    return place.address;
  }

  bool give_back(void* address) {
    Memory dying;  // after the lock
    const std::lock_guard lock(mutex_);
    const auto found = lent_.find(address);
    if (found == lent_.end()) {
      return false;
    }
    dying = std::move(found->second);
    lent_.erase(found);
    return true;
  }

  at::Tensor settle(Parameter parameter, const at::Tensor& gradient) {
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(parameter);
    if (found == places_.end() || !lent_.contains(found->second.address)) {
      return gradient;
    }
    if (is_alone_in(found->second, gradient)) {
      return found->second.part.detach();
    }
    move_away(found->second);
    return gradient;
  }

 private:
  // Requires the lock, as everything below. The places stay known: others of them may be lent now,
  // and what lies there has to be found before DDP writes.
  void move_away(const Place& place) {
    c10::StorageImpl* const storage = place.part.storage().unsafeGetStorageImpl();
    const auto* const begin = static_cast<const std::byte*>(storage->data());
    const auto* const end = begin + storage->nbytes();
    Memory old = std::make_shared<c10::DataPtr>(move_storage(storage));
    for (auto& [address, memory] : lent_) {
      const auto* const lies_at = static_cast<const std::byte*>(address);
      if (lies_at >= begin && lies_at < end) {
        memory = old;
      }
    }
    // NumPy arrays of gradients, which know nothing but the address, stay readable.
    left_behind_[place.model].push_back(std::move(old));
    misfits_.emplace(place.model, place.bytes);
    for (auto& [parameter, other] : places_) {
      if (other.part.storage().unsafeGetStorageImpl() == storage) {
        other.address = other.part.data_ptr();
      }
    }
  }

  // Into the arena, or anywhere else. Returns what held its memory.
  static c10::DataPtr move_storage(c10::StorageImpl* storage) {
    c10::DataPtr moved;
    try {
      moved = arena_allocator()->allocate(storage->nbytes());
    } catch (const c10::OutOfMemoryError&) {
      moved = c10::GetDefaultCPUAllocator()->allocate(storage->nbytes());
    }
    std::memcpy(moved.mutable_get(), storage->data(), storage->nbytes());
    return storage->set_data_ptr(std::move(moved));
  }

  void count() {
    sizes_.clear();
    for (const auto& [parameter, place] : places_) {
      sizes_.insert(place.bytes);
    }
    least_.store(sizes_.empty() ? kNever : *sizes_.begin(), std::memory_order_relaxed);
  }

  std::atomic<std::size_t> least_{kNever};
  std::mutex mutex_;
  // All of these guarded by mutex_.
  std::unordered_map<Parameter, Place> places_;
  std::unordered_map<void*, Memory> lent_;  // what keeps the memory, by address
  std::set<std::size_t> sizes_;             // of the places
  std::set<std::pair<const GradientPlaces*, std::size_t>> misfits_;
  std::map<const GradientPlaces*, std::vector<Memory>> left_behind_;
};

Table& table() {
  static auto* const table = new Table();  // tensors may be freed at any time: never destroyed
  return *table;
}

// Of the node that stores a parameter's gradient: runs after all hooks of the parameter.
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

// Passes on what it gets, in other sizes and strides.
bool is_view(const Node& node) {
  static constexpr std::array<std::string_view, 6> kViews{
      "TBackward0",    "TransposeBackward0",  "PermuteBackward0",
      "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"};
  const std::string name = node.name();  // with or without namespaces, by version
  return std::any_of(kViews.begin(), kViews.end(),
                     [&](std::string_view view) { return name.ends_with(view); });
}

// What stores the result of a node for a parameter; null: something else happens to it.
AccumulateGrad* accumulator_behind(Node* node) {
  for (int depth = 0; node != nullptr && depth < 4; ++depth) {
    if (auto* const accumulator = dynamic_cast<AccumulateGrad*>(node)) {
      return accumulator;
    }
    if (node->num_outputs() != 1 || !is_view(*node)) {
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

}  // namespace

GradientPlaces::GradientPlaces() { wrap_cpu_allocator(); }

GradientPlaces::~GradientPlaces() { table().forget(this); }

void GradientPlaces::set(const std::vector<at::Tensor>& parameters,
                         const std::vector<at::Tensor>& parts) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parts[i].nbytes() >= kLeastBytes && parameters[i].is_contiguous() &&
        parameters[i].is_leaf()) {
      table().set(this, parameters[i].unsafeGetTensorImpl(), accumulator_with_hook(parameters[i]),
                  parts[i]);
    }
  }
}

std::size_t least_place_bytes() { return table().least_bytes(); }

void* lend_place(std::size_t bytes) {
  if (!table().has_size(bytes) || c10::GradMode::is_enabled()) {
    return nullptr;
  }
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return nullptr;
  }
  for (const torch::autograd::Edge& edge : node->next_edges()) {
    AccumulateGrad* const accumulator = accumulator_behind(edge.function.get());
    if (accumulator != nullptr && accumulator->variable.defined() && will_run(accumulator)) {
      if (void* const place = table().lend(accumulator, bytes)) {
        return place;
      }
    }
  }
  return nullptr;
}

bool give_place_back(void* address) { return table().give_back(address); }

}  // namespace horon::torch_backend
