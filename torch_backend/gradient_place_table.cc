#include "gradient_place_table.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/RefcountedDeleter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lies_in_place.h"
#include "process_arena.h"

namespace horon::torch_backend {
namespace {

// Whether nobody else holds its memory. A view holds the tensor that it was made of.
bool is_only_owner(const at::Tensor& gradient) {
  if (!torch::autograd::impl::is_tensor_stealable(gradient)) {
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
  return torch::autograd::impl::is_tensor_stealable(view.base_) &&
         gradient.storage().use_count() == 2;
}

bool is_within(const void* address, const c10::StorageImpl& memory) {
  const auto* const begin = static_cast<const std::byte*>(memory.data());
  const auto* const at = static_cast<const std::byte*>(address);
  return at >= begin && at < begin + memory.nbytes();
}

const at::Tensor& stored_gradient(const GradientPlace& place) {
  return static_cast<const torch::autograd::AccumulateGrad&>(*place.accumulator).variable.grad();
}

bool wants_one(const GradientPlace& place) {
  return place.is_used && !place.is_misfit && !place.habit.is_hopeless() &&
         !stored_gradient(place).defined();
}

bool has_own_gradients(const GradientPlace& place) {
  return !place.pack && place.model->gradients() == DdpGradients::kOwn;
}

// What the own gradient in the place lies in; null: there is none.
c10::intrusive_ptr<c10::StorageImpl> own_gradient(const GradientPlace& place) {
  auto own = place.own.lock();
  return own && is_within(own->data(), *place.part.storage().unsafeGetStorageImpl()) ? own
                                                                                     : nullptr;
}

bool is_stored_gradient(const c10::StorageImpl& storage, const GradientPlace& place) {
  const at::Tensor& stored = stored_gradient(place);
  return stored.defined() && stored.has_storage() &&
         stored.storage().unsafeGetStorageImpl() == &storage;
}

bool is_kept(const GradientPlace& place) {
  const auto own = own_gradient(place);
  return own && !is_stored_gradient(*own, place);
}

// Whether DDP and OwnGradients are all who see what is stored.
bool has_no_other_hooks(const GradientPlace& place) {
  return place.accumulator->post_hooks().size() == 2;
}

// That of the place, which it keeps, and by which DDP knows that it is the bucket's.
c10::DataPtr shared_memory(const GradientPlace& place) {
  const c10::Storage& bucket = place.part.storage();
  c10::maybeApplyRefcountedDeleter(bucket);
  auto* const shared = static_cast<c10::RefcountedDeleterContext*>(bucket.data_ptr().get_context());
  ++shared->refcount;
  return {place.address(), shared, &c10::refcounted_deleter, place.device};
}

at::Tensor make_own_gradient(GradientPlace& place) {
  c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), place.bytes, shared_memory(place),
      place.part.storage().allocator(), true);
  place.own = storage.getWeakStorageImpl();
  auto gradient = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), place.part.dtype());
  gradient.unsafeGetTensorImpl()->set_sizes_and_strides(place.part.sizes(), place.part.strides());
  return gradient;
}

// Whether autograd adds it to the stored gradient where that is, or stores it as it is.
bool is_plain(const at::Tensor& gradient) {
  return !c10::GradMode::is_enabled() && gradient.defined() && !at::isTensorSubclassLike(gradient);
}

// Into the arena, or anywhere else. Returns what held its memory.
c10::DataPtr move_storage(c10::StorageImpl* storage) {
  c10::DataPtr moved;
  try {
    moved = arena_allocator()->allocate(storage->nbytes());
  } catch (const c10::OutOfMemoryError&) {
    moved = c10::GetDefaultCPUAllocator()->allocate(storage->nbytes());
  }
  std::memcpy(moved.mutable_get(), storage->data(), storage->nbytes());
  return storage->set_data_ptr(std::move(moved));
}

// In the middle of a pass: of what else is in the bucket DDP has taken some for its views.
void move_own_gradient(GradientPlace& place) {
  place.is_misfit = true;
  move_storage(place.own.lock().get());
}

c10::Storage storage_of(c10::DataPtr memory, std::size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               std::move(memory), nullptr, false);
}

}  // namespace

template <typename Predicate>
std::vector<std::shared_ptr<GradientPlace>> GradientPlaceTable::take_out(Predicate is_wanted) {
  std::vector<SharedPlace> taken;
  const std::lock_guard lock(mutex_);
  for (auto it = places_.begin(); it != places_.end();) {
    if (is_wanted(*it->second)) {
      it->second->is_used = false;
      taken.push_back(std::move(it->second));
      it = places_.erase(it);
    } else {
      ++it;
    }
  }
  if (!taken.empty()) {
    for (Sizes* const sizes : {&on_cpu_, &on_gpu_}) {
      for (std::atomic<std::uint64_t>& word : sizes->words) {
        word.store(0, std::memory_order_relaxed);
      }
    }
    for (const auto& [parameter, place] : places_) {
      add_size(*place);
    }
  }
  return taken;
}

void GradientPlaceTable::set(Parameter parameter, SharedPlace place) {
  const std::lock_guard lock(mutex_);
  SharedPlace& known = places_[parameter];
  if (known && known->accumulator.get() == place->accumulator.get() &&
      known->bytes == place->bytes) {
    place->habit = known->habit;
  }
  if (known) {
    known->is_used = false;
    if (!place->pack && known->loan->address() == place->address()) {
      place->loan = known->loan;
    }
  }
  const bool is_successor = known && known->model == place->model && known->bytes == place->bytes;
  if (is_successor) {
    place->own = known->own;
  }
  place->set_in = torch::autograd::get_current_graph_task_id();
  place->is_misfit =
      (is_successor && known->is_misfit) || misfits_.contains({place->model, place->bytes});
  add_size(*place);
  std::swap(known, place);  // the old one dies after the lock
}

void GradientPlaceTable::forget(const GradientPlaces* model) {
  std::vector<c10::Storage> memory;
  const auto dying = take_out([model](const GradientPlace& place) { return place.model == model; });
  const std::lock_guard lock(mutex_);
  std::erase_if(misfits_, [model](const auto& misfit) { return misfit.first == model; });
  begun_.erase(model);
  if (const auto found = left_behind_.find(model); found != left_behind_.end()) {
    memory = std::move(found->second);
    left_behind_.erase(found);
  }
}

GradientPlaceTable::Expected GradientPlaceTable::expected(const Accumulator& accumulator,
                                                          int graph_task) {
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(accumulator.variable.unsafeGetTensorImpl());
  if (found == places_.end() || found->second->accumulator.get() != &accumulator) {
    return {};
  }
  const SharedPlace& place = found->second;
  if (place->graph_task != graph_task) {
    place->graph_task = graph_task;
    place->n_nodes = 0;
  }
  const int node = place->n_nodes++;
  const std::optional<AllocationNumber> number = place->habit.number();
  if (!wants_one(*place) || place->set_in == graph_task) {
    return {};
  }
  if (number && number->node != node) {
    place->passed_by = graph_task;
    return {};
  }
  return {place, place->bytes, node, number ? std::optional(number->in_node) : std::nullopt};
}

GradientPlaceTable::Answer GradientPlaceTable::lend(GradientPlace& place, int node,
                                                    const GradientRequest& request) {
  std::shared_ptr<GradientPlaces::Owner> owner;  // may be the last one who holds it: after the lock
  const std::lock_guard lock(mutex_);
  if (!wants_one(place) || place.bytes != request.bytes || place.device != request.device) {
    return {};
  }
  Answer answer{.is_onlooker = true};
  const AllocationNumber number{node, request.number};
  if (place.habit.number() != number) {
    return answer;
  }
  owner = place.model->owner();
  if (!place.model->is_lending()) {
    answer.ask = std::move(owner);
    return answer;
  }
  if (has_own_gradients(place)) {
    leave_to_keepers(place.model);
    if (own_gradient(place) || !has_no_other_hooks(place)) {
      return answer;
    }
  }
  void* const address = place.address();
  if (place.loan->address() != nullptr || (place.device.is_cpu() && !is_in_arena(address))) {
    return answer;
  }
  if (place.pack && (!owner || !owner->may_lend(place.index) || place.pack->is_kept() ||
                     !place.pack->may_lend_on_current_stream())) {
    return answer;
  }
  const auto& holder = place.pack ? place.pack->buffer() : place.part;
  place.habit.see(request.graph_task, number, address);
  answer.lent = place.loan->lend(address, holder.storage(), place.device);
  return answer;
}

void GradientPlaceTable::see(GradientPlace& place, int node, const GradientRequest& request,
                             const void* address) {
  const std::lock_guard lock(mutex_);
  place.habit.see(request.graph_task, {node, request.number}, address);
}

void GradientPlaceTable::learn(Parameter parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  if (const auto found = places_.find(parameter); found != places_.end()) {
    learn(*found->second, gradient);
  }
}

void GradientPlaceTable::learn(GradientPlace& place, const at::Tensor& gradient) {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (place.habit.has_seen(graph_task)) {
    place.habit.learn(graph_task, address_of(gradient));
  } else if (place.passed_by == graph_task) {
    place.habit.miss();
  }
}

at::Tensor GradientPlaceTable::settle(Parameter parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(parameter);
  if (found == places_.end() || found->second->pack) {
    return gradient;
  }
  GradientPlace& place = *found->second;
  learn(place, gradient);
  const bool is_own = has_own_gradients(place);
  if (is_own && own_gradient(place) && (is_kept(place) || !is_plain(gradient))) {
    move_own_gradient(place);
  }
  if (place.loan->address() != place.address()) {
    return gradient;
  }
  if (lies_in_place(gradient, place.part) && is_only_owner(gradient)) {
    return is_own ? make_own_gradient(place) : place.part.detach();
  }
  note_misfit(place);
  move_away(place);
  return gradient;
}

c10::Storage GradientPlaceTable::leave(GradientLoan& loan) {
  std::shared_ptr<GradientPack> pack;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(places_.begin(), places_.end(), [&](const auto& known) {
      return known.second->loan.get() == &loan;
    });
    pack = found != places_.end() ? found->second->pack : nullptr;
  }
  c10::Storage memory = loan.memory();
  if (pack) {
    // Used on several streams: which of them a place would have to wait for, nobody knows.
    const auto dying = take_out([&](const GradientPlace& place) { return place.pack == pack; });
    if (pack->buffer().storage().is_alias_of(memory)) {
      pack->leave_memory();
    }
  }
  return memory;
}

void GradientPlaceTable::forsake(const GradientPack& pack) {
  const std::lock_guard lock(mutex_);
  for (const auto& [parameter, place] : places_) {
    if (place->pack.get() == &pack && place->loan->is_unsettled_at(place->address())) {
      note_misfit(*place);
    }
  }
}

void GradientPlaceTable::note_misfit(const GradientPlace& place) {
  misfits_.emplace(place.model, place.bytes);
  for (const auto& [parameter, other] : places_) {
    other->is_misfit =
        other->is_misfit || (other->model == place.model && other->bytes == place.bytes);
  }
}

// The places stay known: others of them may be lent now, and what lies there has to be found
// before DDP writes.
c10::Storage GradientPlaceTable::leave_memory(const GradientPlace& place) {
  c10::StorageImpl* const storage = place.part.storage().unsafeGetStorageImpl();
  std::vector<GradientLoan*> within;
  for (const auto& [parameter, other] : places_) {
    if (is_within(other->loan->address(), *storage)) {
      within.push_back(other->loan.get());
    }
  }
  c10::Storage old = storage_of(move_storage(storage), storage->nbytes());
  for (GradientLoan* const loan : within) {
    loan->keep(old);
  }
  return old;
}

void GradientPlaceTable::move_away(const GradientPlace& place) {
  // DDP has taken those of this pass for views.
  std::vector<GradientPlace*> own;
  for (const auto& [parameter, other] : places_) {
    if (other->part.defined() && other->part.storage().is_alias_of(place.part.storage()) &&
        own_gradient(*other) && !is_kept(*other)) {
      own.push_back(other.get());
    }
  }
  // NumPy arrays of gradients, which know nothing but the address, stay readable.
  left_behind_[place.model].push_back(leave_memory(place));
  for (GradientPlace* const other : own) {
    other->own.lock()->set_data_ptr_noswap(shared_memory(*other));
  }
}

void GradientPlaceTable::begin_pass(const GradientPlaces* model) {
  const std::lock_guard lock(mutex_);
  leave_to_keepers(model);
}

void GradientPlaceTable::leave_to_keepers(const GradientPlaces* model) {
  if (!begun_.insert(model).second) {
    return;
  }
  for (const auto& [parameter, place] : places_) {
    if (place->model == model && is_kept(*place)) {
      place->is_misfit = true;
      leave_memory(*place);  // other own gradients, which nothing was added to yet, stay there, too
    }
  }
}

void GradientPlaceTable::end_pass(const GradientPlaces* model) {
  const std::lock_guard lock(mutex_);
  begun_.erase(model);
}

void GradientPlaceTable::give_way(const GradientPlaces* model, Parameter parameter) {
  const std::lock_guard lock(mutex_);
  if (const SharedPlace place = place_of(model, parameter); place && is_kept(*place)) {
    move_own_gradient(*place);
  }
}

std::shared_ptr<GradientPlace> GradientPlaceTable::place_of(const GradientPlaces* model,
                                                            Parameter parameter) const {
  const auto found = places_.find(parameter);
  return found != places_.end() && found->second->model == model ? found->second : nullptr;
}

bool GradientPlaceTable::is_misplaced(const GradientPlaces* model, Parameter parameter,
                                      const at::Tensor& gradient) {
  if (!gradient.has_storage()) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  const SharedPlace place = place_of(model, parameter);
  if (place &&
      gradient.storage().unsafeGetStorageImpl() == place->part.storage().unsafeGetStorageImpl()) {
    return true;
  }
  const bool is_in_some_bucket =
      gradient.storage().data_ptr().get_deleter() == &c10::refcounted_deleter;
  return is_in_some_bucket &&
         !(place && lies_in_place(gradient, place->part) && gradient.is_alias_of(place->part));
}

void GradientPlaceTable::add_size(const GradientPlace& place) {
  Sizes& sizes = place.device.is_cpu() ? on_cpu_ : on_gpu_;
  sizes.words[word_of(place.bytes)].fetch_or(bit_of(place.bytes), std::memory_order_relaxed);
}

}  // namespace horon::torch_backend
