#include "gradient_product.h"

#include <ATen/CPUFunctions.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "named/named_engine.h"

namespace horon::torch_backend {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
namespace generated = torch::autograd::generated;

struct Watched {
  std::weak_ptr<GradientProducts> owner;
  std::size_t parameter = 0;
  AccumulatorUse use;
};

class WatchedProducts {
 public:
  void watch(Node* accumulator, Watched watched) {
    const std::lock_guard lock(mutex_);
    watched_[accumulator] = std::move(watched);
    is_empty_.store(false, std::memory_order_relaxed);
  }
  void forget(Node* accumulator) {
    const std::lock_guard lock(mutex_);
    watched_.erase(accumulator);
    is_empty_.store(watched_.empty(), std::memory_order_relaxed);
  }
  bool is_empty() const { return is_empty_.load(std::memory_order_relaxed); }
  // Without an owner, if it is not watched.
  Watched find(const Node* accumulator) {
    const std::lock_guard lock(mutex_);
    const auto found = watched_.find(accumulator);
    return found == watched_.end() ? Watched{} : found->second;
  }

 private:
  std::atomic<bool> is_empty_{true};
  std::mutex mutex_;
  std::unordered_map<const Node*, Watched> watched_;  // guarded by mutex_
};

WatchedProducts& watched_products() {
  // Backward passes may run until the process ends: never destroyed.
  static auto* const watched = new WatchedProducts();
  return *watched;
}

// Nobody looks at what comes to the node, or leaves it.
bool has_no_hooks(Node& node, std::size_t n_own_pre_hooks = 0, std::size_t n_own_post_hooks = 0) {
  return node.pre_hooks().size() == n_own_pre_hooks && node.tensor_pre_hooks().empty() &&
         node.retains_grad_hooks().empty() && node.post_hooks().size() == n_own_post_hooks;
}

// Whether the backward pass makes the gradients of all parameters, and no graph.
bool is_plain_backward() {
  if (c10::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() == -1) {
    return false;
  }
  const auto* const only = torch::autograd::get_current_graph_task_exec_info();
  return only == nullptr || only->empty();
}

struct Found {
  std::shared_ptr<GradientProducts> owner;
  std::size_t parameter = 0;
};

// Of a node of mm() or addmm(): what an edge leads to, if the product is what is stored there.
std::optional<Found> find_behind(const Edge& edge, bool other_needs_gradient, at::IntArrayRef sizes,
                                 c10::ScalarType type) {
  const Edge* stored = &edge;
  if (auto* const transpose = dynamic_cast<generated::TBackward0*>(edge.function.get())) {
    // Held by the edge, and by the transposed parameter, which is kept for the other gradient.
    const std::size_t n_holders = other_needs_gradient ? 2 : 1;
    if (transpose->num_outputs() != 1 || !has_no_hooks(*transpose) ||
        edge.function.use_count() != n_holders) {
      return std::nullopt;
    }
    stored = &transpose->next_edge(0);
  }
  auto* const accumulator = dynamic_cast<AccumulateGrad*>(stored->function.get());
  if (accumulator == nullptr) {
    return std::nullopt;
  }
  const Watched watched = watched_products().find(accumulator);
  const auto owner = watched.owner.lock();
  const at::Tensor& parameter = accumulator->variable;
  const AccumulatorUse& use = watched.use;
  const bool is_alone =
      static_cast<std::size_t>(stored->function.use_count()) == use.n_holders + 1 &&  // the edge
      has_no_hooks(*accumulator, use.n_pre_hooks, use.n_post_hooks) &&
      accumulator->tensor_post_acc_grad_hooks() == nullptr;
  if (!owner || !is_alone || !parameter.defined() || parameter.grad().defined() ||
      parameter.sizes() != sizes || parameter.scalar_type() != type || !parameter.is_contiguous() ||
      !owner->may_make(watched.parameter)) {
    return std::nullopt;
  }
  return Found{owner, watched.parameter};
}

std::optional<Found> find_gradient(const at::Tensor& a, const at::Tensor& b) {
  if (!is_plain_backward()) {
    return std::nullopt;
  }
  const std::array<std::int64_t, 2> sizes{a.size(0), b.size(1)};
  // Factors, and so their gradients, have two each of three numbers of rows and columns. That of
  // the other factor has the one that is added up over here.
  const bool is_ambiguous = a.size(1) == sizes[0] || a.size(1) == sizes[1];
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return std::nullopt;
  }
  std::size_t first = 0;  // of the factors
  if (const auto* const addmm = dynamic_cast<generated::AddmmBackward0*>(node.get())) {
    if (!addmm->alpha.equal(1)) {
      return std::nullopt;
    }
    first = 1;
  } else if (dynamic_cast<generated::MmBackward0*>(node.get()) == nullptr) {
    return std::nullopt;
  }
  if (node->num_outputs() != first + 2 || !has_no_hooks(*node)) {
    return std::nullopt;
  }
  std::optional<Found> found;
  for (const std::size_t factor : {first, first + 1}) {
    const Edge& edge = node->next_edge(factor);
    const Edge& other = node->next_edge(2 * first + 1 - factor);
    if (!edge.is_valid() || (other.is_valid() && is_ambiguous)) {
      continue;
    }
    auto behind = find_behind(edge, other.is_valid(), sizes, a.scalar_type());
    if (behind && found) {
      return std::nullopt;
    }
    found = behind ? behind : found;
  }
  return found;
}

// Rows of a product, [from, until).
struct Rows {
  std::int64_t from = 0;
  std::int64_t until = 0;

  at::Tensor of(const at::Tensor& tensor) const { return tensor.narrow(0, from, until - from); }
};

std::size_t row_bytes_of(const at::Tensor& product) {
  return product.nbytes() / static_cast<std::size_t>(product.size(0));
}

// Those that have the bytes from `begin`, where a row begins, up to `end`.
Rows rows_with(std::size_t begin, std::size_t end, std::size_t row_bytes) {
  return {static_cast<std::int64_t>(begin / row_bytes),
          static_cast<std::int64_t>((end + row_bytes - 1) / row_bytes)};
}

PartMaker::Make make_rows_of(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b) {
  return [=, row_bytes = row_bytes_of(product)](std::size_t begin, std::size_t end) {
    const Rows rows = rows_with(begin, end, row_bytes);
    at::Tensor part = rows.of(product);
    at::cpu::mm_out(part, rows.of(a), b);
    return static_cast<std::size_t>(rows.until) * row_bytes;
  };
}

// Whether the rows of a product have these bits if they are made as they are when it is reduced
// meanwhile.
bool has_bits_in_parts(const at::Tensor& product, const at::Tensor& a, const at::Tensor& b) {
  bool are_same = true;
  const std::size_t row_bytes = row_bytes_of(product);
  PartMaker maker(product.nbytes(), [&](std::size_t begin, std::size_t end) {
    const Rows rows = rows_with(begin, end, row_bytes);
    const at::Tensor expected = rows.of(product);
    at::Tensor part = at::empty(expected.sizes(), product.options());
    at::cpu::mm_out(part, rows.of(a), b);
    are_same = are_same &&
               std::memcmp(part.const_data_ptr(), expected.const_data_ptr(), part.nbytes()) == 0;
    return static_cast<std::size_t>(rows.until) * row_bytes;
  });
  for (std::size_t end = kPartBytes; maker.has_more(); end += kPartBytes) {
    maker.make_until(end);
  }
  return are_same;
}

// Which products have the same bits if they are made in parts.
class SameBits {
 public:
  std::optional<bool> find(const at::Tensor& a, const at::Tensor& b) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(shape_of(a, b));
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }

  void note(const at::Tensor& a, const at::Tensor& b, bool are_same) {
    const std::lock_guard lock(mutex_);
    if (known_.size() >= kMostKnown) {
      known_.clear();
    }
    known_[shape_of(a, b)] = are_same;
  }

 private:
  using Shape = std::array<std::int64_t, 9>;
  static constexpr std::size_t kMostKnown = 4096;

  static Shape shape_of(const at::Tensor& a, const at::Tensor& b) {
    return {a.size(0),
            a.size(1),
            b.size(1),
            a.stride(0),
            a.stride(1),
            b.stride(0),
            b.stride(1),
            at::get_num_threads(),
            static_cast<std::int64_t>(a.scalar_type())};
  }

  std::mutex mutex_;
  std::map<Shape, bool> known_;  // guarded by mutex_
};

at::Tensor make_gradient(const Found& found, const at::Tensor& a, const at::Tensor& b) {
  static auto* const same_bits = new SameBits();  // never destroyed, like the table
  at::Tensor gradient = at::empty({a.size(0), b.size(1)}, a.options());
  const std::optional<bool> are_same = same_bits->find(a, b);
  if (are_same.value_or(false)) {
    found.owner->make(found.parameter, gradient, make_rows_of(gradient, a, b));
    return gradient;
  }
  at::cpu::mm_out(gradient, a, b);
  if (!are_same) {
    same_bits->note(a, b, has_bits_in_parts(gradient, a, b));
  }
  return gradient;
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  if (!watched_products().is_empty() && a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) &&
      a.scalar_type() == b.scalar_type() && a.is_floating_point() && a.numel() > 0 &&
      static_cast<std::size_t>(a.size(0) * b.size(1)) * a.element_size() >=
          NamedEngine::kMeetForBytes) {
    if (const auto found = find_gradient(a, b)) {
      return make_gradient(*found, a, b);
    }
  }
  return at::cpu::mm(a, b);
}

// Whether the kernel is torch's, whose place ours may take, and not one that somebody else has put
// there.
bool is_kernel_torchs() {
  const auto handle = c10::Dispatcher::singleton().findSchema({"aten::mm", ""});
  if (!handle) {
    return false;
  }
  const std::string state = handle->dumpState();
  const std::size_t begin = state.find("\nCPU: ");
  const std::size_t end = begin == std::string::npos ? begin : state.find('\n', begin + 1);
  return end != std::string::npos &&
         state.substr(begin, end - begin).find("RegisterCPU") != std::string::npos &&
         state.find("\nCPU (inactive)") == std::string::npos;
}

// Torch warns, once for all kernels, of one that replaces another.
class NoWarning final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!is_kernel_torchs()) {
      return;
    }
    NoWarning no_warning;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warning);
    // Never destroyed, like the table.
    static auto* const library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl("mm", TORCH_FN(mm));
  });
}

}  // namespace

void watch_products(Node* accumulator, std::weak_ptr<GradientProducts> owner, std::size_t parameter,
                    AccumulatorUse use) {
  install();
  watched_products().watch(accumulator, {std::move(owner), parameter, use});
}

void forget_products(Node* accumulator) { watched_products().forget(accumulator); }

}  // namespace horon::torch_backend
