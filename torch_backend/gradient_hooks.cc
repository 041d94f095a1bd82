#include "gradient_hooks.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/options.h"
#include "gradient_places.h"
#include "gradient_product.h"

namespace py = pybind11;

namespace horon::torch_backend {
namespace {

// In a backward pass, where the GIL is not held, and exceptions travel to another thread.
template <typename... Arguments>
void call(const py::function& function, Arguments... arguments) {
  const py::gil_scoped_acquire gil;
  try {
    function(arguments...);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

using Variables = torch::autograd::variable_list;

bool came_as_it_is(const at::Tensor& gradient, const Variables& incoming) {
  return !incoming.empty() && incoming[0].defined() && gradient.defined() &&
         gradient.has_storage() && incoming[0].has_storage() &&
         gradient.storage().is_alias_of(incoming[0].storage());
}

// How many owners the gradient's memory has in what came in: that tensor and what it is a view of,
// which normally nobody but the view holds. 0 if somebody does, or if autograd has copied it.
std::size_t owners_among(const Variables& incoming, const at::Tensor& gradient) {
  if (!came_as_it_is(gradient, incoming)) {
    return 0;
  }
  const auto* const meta = torch::autograd::impl::get_view_autograd_meta(incoming[0]);
  if (meta == nullptr) {
    return 1;
  }
  const auto& view = meta->has_bw_view() ? meta->get_backward_view() : meta->get_forward_view();
  return view.base_.use_count() == 1 ? 2 : 0;
}

// Note [Gradients that share memory]
// Autograd makes what a node hands out a parameter's .grad as it is, if nobody else holds that
// tensor. But it may be a view of one that another node still has to read: of x = tokens +
// positions.unsqueeze(0), with a batch of one, the gradient of `positions` is a view of x's, which
// the embedding of `tokens` gets next. Reduced where it is, it would change under its hands.
bool is_shared(const at::Tensor& gradient, const Variables& incoming) {
  return came_as_it_is(gradient, incoming) &&
         gradient.storage().use_count() > 1 + owners_among(incoming, gradient);
}

// The stream waits for everything that is queued on the other one.
void await(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event event(other.device_type());
  event.record(other);
  event.block(stream);
}

}  // namespace

// The streams on which the gradients of a bucket were made: one, unless a model uses several.
class GradientStreams {
 public:
  void add(c10::Device device) {
    const c10::Stream stream = current(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }

  // What the current streams do between the two comes after all gradients, and before whatever the
  // gradients' streams use their memory for again.
  void before_send() const {
    for (const c10::Stream& stream : streams_) {
      if (const c10::Stream now = current(stream.device()); now != stream) {
        await(now, stream);
      }
    }
  }
  void after_send() {
    for (const c10::Stream& stream : streams_) {
      if (const c10::Stream now = current(stream.device()); now != stream) {
        await(stream, now);
      }
    }
    streams_.clear();
  }

 private:
  static c10::Stream current(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  std::vector<c10::Stream> streams_;
};

struct GradientHooks::State final : GradientPlaces::Owner, GradientProducts {
  Callbacks callbacks;
  int passes = 1;
  std::vector<int> passes_left;                // by parameter
  std::vector<int> bucket_of;                  // by parameter, as soon as they are laid out
  std::vector<std::optional<Place>> place_of;  // by parameter
  std::vector<int> sizes;                      // by bucket
  std::vector<SharedBucket> buckets;           // by bucket; null if it goes from Python
  std::vector<int> n_ready;                    // by bucket
  std::vector<at::Tensor> parameters;
  std::vector<GradientStreams> streams;    // by bucket
  std::unique_ptr<GradientPlaces> places;  // null where none is lent
  bool has_gradients = false;
  GradientPacks packs;
  std::mutex beginning;  // gradients of a CPU and of a GPU come on two threads
  std::atomic<bool> has_begun{false};
  // Released last: gradients of a CPU and of a GPU come on two threads.
  std::atomic<bool> is_laid_out{false};

  void begin_step() override {
    if (has_begun.load(std::memory_order_acquire)) {
      return;
    }
    const std::lock_guard lock(beginning);
    if (!has_begun.load(std::memory_order_relaxed)) {
      packs.set_aside_kept();
      if (places) {
        places->set_lending(true);
      }
      has_begun.store(true, std::memory_order_release);
    }
  }

  // Only the first one of a step: later, somebody may have it, or it is out.
  bool may_lend(std::size_t parameter) const override { return passes_left[parameter] == passes; }

  // Of a bucket of its own, and as the first and only one of a step.
  bool may_make(std::size_t parameter) const override {
    if (!is_laid_out.load(std::memory_order_acquire) || place_of[parameter] || passes != 1 ||
        passes_left[parameter] != 1) {
      return false;
    }
    const auto bucket = static_cast<std::size_t>(bucket_of[parameter]);
    return sizes[bucket] == 1 && buckets[bucket] && !buckets[bucket]->is_out();
  }

  void make(std::size_t parameter, const at::Tensor& gradient, PartMaker::Make make) override {
    begin_step();
    has_gradients = true;  // it may be out, whatever becomes of this backward pass
    buckets[static_cast<std::size_t>(bucket_of[parameter])]->make(gradient, std::move(make));
  }

  void came(std::size_t parameter, const Variables& incoming) {
    begin_step();
    const int left = --passes_left[parameter];
    has_gradients = true;
    if (left == passes - 1 && is_laid_out.load(std::memory_order_acquire)) {
      if (const std::optional<Place>& place = place_of[parameter]) {
        place->first->watch(place->second);
      }
    }
    if (left > 0) {
      return;
    }
    if (left < 0) {
      call(callbacks.refuse);
      return;
    }
    if (!is_laid_out.load(std::memory_order_acquire)) {
      call(callbacks.lay_out);
      HORON_CHECK(is_laid_out.load(std::memory_order_acquire), "the gradients were not laid out");
    }
    if (const SharedBucket& made = buckets[static_cast<std::size_t>(bucket_of[parameter])];
        made && made->is_made()) {
      made->settle_made(incoming.empty() ? at::Tensor() : incoming[0]);
      ++n_ready[static_cast<std::size_t>(bucket_of[parameter])];
      return;
    }
    if (const std::optional<Place>& place = place_of[parameter]) {
      place->first->came(place->second);
    } else if (at::Tensor& gradient = parameters[parameter].mutable_grad();
               is_shared(gradient, incoming)) {
      const at::NoGradGuard no_grad;
      gradient = gradient.clone();
    }
    const auto bucket = static_cast<std::size_t>(bucket_of[parameter]);
    if (!parameters[parameter].is_cpu()) {
      streams[bucket].add(parameters[parameter].device());
    }
    if (++n_ready[bucket] == sizes[bucket]) {
      if (const std::optional<Place>& place = place_of[parameter]) {
        // The pack settles the others, whose memory nobody else has any more.
        place->first->settle(place->second, owners_among(incoming, parameters[parameter].grad()));
      }
      streams[bucket].before_send();
      if (!buckets[bucket] || !buckets[bucket]->try_send()) {
        call(callbacks.send, bucket_of[parameter]);
      }
      streams[bucket].after_send();
    }
  }
};

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, int passes,
                             Callbacks callbacks)
    : state_(std::shared_ptr<State>(new State(), [](State* dying) {
        // The last owner may be a hook that dies in a backward pass.
        if (Py_IsInitialized() != 0) {
          const py::gil_scoped_acquire gil;
          delete dying;
        }
      })) {
  state_->callbacks = std::move(callbacks);
  state_->passes = passes;
  state_->passes_left.assign(parameters.size(), passes);
  state_->parameters = parameters;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_VALUE(parameters[i].requires_grad() && parameters[i].is_leaf(), "horon: parameter ",
                      i, " needs no gradient, or is not a leaf.");
    Accumulator accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    const std::uintptr_t key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [state = state_, i](const Variables& outputs, const Variables& inputs) {
              state->came(i, inputs);
              return outputs;
            }));
    hooks_.push_back({std::move(accumulator), key});
  }
}

GradientHooks::~GradientHooks() {
  for (const Hook& hook : hooks_) {
    forget_products(hook.accumulator.get());
    hook.accumulator->del_post_hook(hook.key);
  }
}

void GradientHooks::set_buckets(const std::vector<int>& bucket_of,
                                std::vector<std::optional<Place>> place_of,
                                std::vector<SharedBucket> buckets) {
  State& state = *state_;
  const std::size_t n_parameters = state.passes_left.size();
  TORCH_CHECK_VALUE(bucket_of.size() == n_parameters && place_of.size() == n_parameters,
                    "horon: expected a bucket and a place for ", n_parameters, " parameters, got ",
                    bucket_of.size(), " and ", place_of.size(), ".");
  for (const std::optional<Place>& place : place_of) {
    TORCH_CHECK_VALUE(!place || place->second < place->first->size(), "horon: no such place.");
  }
  std::vector<int> sizes;
  for (const int bucket : bucket_of) {
    TORCH_CHECK_VALUE(bucket >= 0, "horon: bucket ", bucket, " is negative.");
    sizes.resize(std::max(sizes.size(), static_cast<std::size_t>(bucket) + 1));
    ++sizes[static_cast<std::size_t>(bucket)];
  }
  TORCH_CHECK_VALUE(buckets.size() == sizes.size(), "horon: expected ", sizes.size(),
                    " buckets, got ", buckets.size(), ".");
  state.bucket_of = bucket_of;
  state.buckets = std::move(buckets);
  std::vector<std::shared_ptr<GradientPack>> packs;
  for (const std::optional<Place>& place : place_of) {
    if (place) {
      packs.push_back(place->first);
    }
  }
  state.packs.set(std::move(packs));
  state.place_of = std::move(place_of);
  lend_places();
  watch_products_of_buckets();
  state.n_ready.assign(sizes.size(), 0);
  state.streams.assign(sizes.size(), {});
  state.sizes = std::move(sizes);
  state.is_laid_out.store(true, std::memory_order_release);
}

void GradientHooks::lend_places() {
  State& state = *state_;
  if (!gradients_in_place_from_environment()) {
    return;
  }
  for (std::size_t i = 0; i < state.place_of.size(); ++i) {
    const std::optional<Place>& place = state.place_of[i];
    if (!place || !place->first->has_own_memory()) {
      continue;
    }
    if (!state.places) {
      state.places = std::make_unique<GradientPlaces>(state_);
    }
    state.places->set(i, state.parameters[i], place->first, place->second);
  }
}

void GradientHooks::watch_products_of_buckets() {
  const State& state = *state_;
  if (!reduce_while_made_from_environment()) {
    return;
  }
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    const at::Tensor& parameter = state.parameters[i];
    // Of a subclass, other products might look like the gradient's.
    const bool is_plain =
        parameter.has_storage() && !parameter.unsafeGetTensorImpl()->is_python_dispatch();
    if (is_plain && parameter.is_cpu() && parameter.dim() == 2 && !state.place_of[i] &&
        state.buckets[static_cast<std::size_t>(state.bucket_of[i])]) {
      watch_products(hooks_[i].accumulator.get(), state_, i);
    }
  }
}

void GradientHooks::begin_step() { state_->begin_step(); }

std::int64_t GradientHooks::n_set_aside() const { return state_->packs.n_set_aside(); }

std::vector<int> GradientHooks::not_sent() const {
  std::vector<int> numbers;
  for (std::size_t i = 0; i < state_->buckets.size(); ++i) {
    const SharedBucket& bucket = state_->buckets[i];
    if (!bucket || !bucket->is_out()) {
      numbers.push_back(static_cast<int>(i));
    }
  }
  return numbers;
}

void GradientHooks::receive() {
  std::exception_ptr first;
  for (const SharedBucket& bucket : state_->buckets) {
    if (!bucket || !bucket->is_out()) {
      continue;
    }
    try {
      bucket->receive();
    } catch (const UsageError&) {
      throw;
    } catch (const Error&) {
      first = first ? first : std::current_exception();
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void GradientHooks::reset(int passes) {
  State& state = *state_;
  state.passes = passes;
  state.passes_left.assign(state.passes_left.size(), passes);
  state.n_ready.assign(state.n_ready.size(), 0);
  state.streams.assign(state.streams.size(), {});
  state.has_gradients = false;
  state.has_begun.store(false, std::memory_order_relaxed);
  if (state.places) {
    state.places->set_lending(false);
  }
  for (const SharedBucket& bucket : state.buckets) {
    if (bucket) {
      bucket->reset();
    }
  }
}

bool GradientHooks::has_gradients() const { return state_->has_gradients; }

}  // namespace horon::torch_backend
