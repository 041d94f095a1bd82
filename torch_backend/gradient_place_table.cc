#include "gradient_place_table.h"

#include <c10/core/CPUAllocator.h>

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

const void* address_of(const at::Tensor& gradient) {
  return gradient.defined() && gradient.has_storage() ? gradient.const_data_ptr() : nullptr;
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

}  // namespace

template <typename Predicate>
std::vector<GradientPlace> GradientPlaceTable::take_out(Predicate is_wanted) {
  std::vector<GradientPlace> taken;
  const std::lock_guard lock(mutex_);
  for (auto it = places_.begin(); it != places_.end();) {
    if (is_wanted(it->second)) {
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
      add_size(place);
    }
  }
  return taken;
}

void GradientPlaceTable::set(Parameter parameter, GradientPlace place) {
  const std::lock_guard lock(mutex_);
  GradientPlace& known = places_[parameter];
  if (known.accumulator.get() == place.accumulator.get() && known.bytes == place.bytes) {
    place.habit = known.habit;
  }
  add_size(place);
  std::swap(known, place);  // the old one dies after the lock
}

void GradientPlaceTable::forget(const GradientPlaces* model) {
  std::vector<Memory> memory;
  const auto dying = take_out([model](const GradientPlace& place) { return place.model == model; });
  const std::lock_guard lock(mutex_);
  std::erase_if(misfits_, [model](const auto& misfit) { return misfit.first == model; });
  if (const auto found = left_behind_.find(model); found != left_behind_.end()) {
    memory = std::move(found->second);
    left_behind_.erase(found);
  }
}

std::optional<GradientPlaceTable::Expected> GradientPlaceTable::expected(
    const Accumulator& accumulator) {
  const std::lock_guard lock(mutex_);
  const GradientPlace* const place = wanting_one(accumulator);
  return place != nullptr ? std::optional(Expected{place->bytes, place->habit.ordinal()})
                          : std::nullopt;
}

GradientPlaceTable::Answer GradientPlaceTable::lend(const Accumulator& accumulator,
                                                    const GradientRequest& request) {
  std::shared_ptr<GradientPlaces::Owner> owner;  // may be the last one who holds it: after the lock
  const std::lock_guard lock(mutex_);
  GradientPlace* const place = wanting_one(accumulator);
  if (place == nullptr || place->bytes != request.bytes || place->device != request.device) {
    return {};
  }
  Answer answer{.is_onlooker = true};
  if (place->habit.ordinal() != request.ordinal) {
    return answer;
  }
  owner = place->model->owner();
  if (!place->model->is_lending()) {
    answer.ask = std::move(owner);
    return answer;
  }
  void* const address = place->address();
  if (lent_.contains(address) || (place->device.is_cpu() && !is_in_arena(address))) {
    return answer;
  }
  if (place->pack &&
      (!owner || !owner->may_lend(place->index) || !place->pack->may_lend_on_current_stream())) {
    return answer;
  }
  const auto& holder = place->pack ? place->pack->buffer() : place->part;
  lent_[address] = {std::make_shared<c10::Storage>(holder.storage()), place->pack};
  n_lent_.store(lent_.size(), std::memory_order_relaxed);
  place->habit.see(request.graph_task, request.ordinal, address);
  answer.place = address;
  return answer;
}

void GradientPlaceTable::see(Parameter parameter, const GradientRequest& request,
                             const void* address) {
  const std::lock_guard lock(mutex_);
  if (const auto found = places_.find(parameter); found != places_.end()) {
    found->second.habit.see(request.graph_task, request.ordinal, address);
  }
}

bool GradientPlaceTable::give_back_lent(void* address) {
  Lent dying;  // after the lock
  const std::lock_guard lock(mutex_);
  const auto found = lent_.find(address);
  if (found == lent_.end()) {
    return false;
  }
  dying = std::move(found->second);
  lent_.erase(found);
  n_lent_.store(lent_.size(), std::memory_order_relaxed);
  return true;
}

bool GradientPlaceTable::is_lent(const void* address) {
  if (n_lent_.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  return lent_.contains(const_cast<void*>(address));
}

void GradientPlaceTable::note_settled(const void* address) {
  const std::lock_guard lock(mutex_);
  if (const auto found = lent_.find(const_cast<void*>(address)); found != lent_.end()) {
    found->second.is_settled = true;
  }
}

void GradientPlaceTable::learn(Parameter parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  if (const auto found = places_.find(parameter); found != places_.end()) {
    found->second.habit.learn(address_of(gradient));
  }
}

at::Tensor GradientPlaceTable::settle(Parameter parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(parameter);
  if (found == places_.end() || found->second.pack) {
    return gradient;
  }
  GradientPlace& place = found->second;
  place.habit.learn(address_of(gradient));
  if (!lent_.contains(place.address())) {
    return gradient;
  }
  if (lies_in_place(gradient, place.part) && is_only_owner(gradient)) {
    return place.part.detach();
  }
  misfits_.emplace(place.model, place.bytes);
  move_away(place);
  return gradient;
}

c10::Storage GradientPlaceTable::leave(const void* address) {
  Lent lent;
  {
    const std::lock_guard lock(mutex_);
    const auto found = lent_.find(const_cast<void*>(address));
    if (found == lent_.end() || !found->second.pack) {
      return {};
    }
    lent = found->second;
  }
  // Used on several streams: which of them a place would have to wait for, nobody knows.
  const auto dying = take_out([&](const GradientPlace& place) { return place.pack == lent.pack; });
  const c10::Storage memory = *std::static_pointer_cast<c10::Storage>(lent.memory);
  if (lent.pack->buffer().storage().is_alias_of(memory)) {
    lent.pack->leave_memory();
  }
  return memory;
}

bool GradientPlaceTable::forsake_if_lent(const GradientPack& pack) {
  if (n_lent_.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  const c10::StorageImpl& memory = *pack.buffer().storage().unsafeGetStorageImpl();
  const std::lock_guard lock(mutex_);
  const auto is_other = [&](const auto& lent) {
    return !lent.second.is_settled && is_within(lent.first, memory);
  };
  if (std::none_of(lent_.begin(), lent_.end(), is_other)) {
    return false;
  }
  for (const auto& [parameter, place] : places_) {
    if (place.pack.get() == &pack) {
      const auto lent = lent_.find(place.address());
      if (lent != lent_.end() && is_other(*lent)) {
        misfits_.emplace(place.model, place.bytes);
      }
    }
  }
  return true;
}

GradientPlace* GradientPlaceTable::wanting_one(const Accumulator& accumulator) {
  const auto found = places_.find(accumulator.variable.unsafeGetTensorImpl());
  if (found == places_.end() || found->second.accumulator.get() != &accumulator ||
      found->second.habit.is_hopeless() || accumulator.variable.grad().defined() ||
      misfits_.contains({found->second.model, found->second.bytes})) {
    return nullptr;
  }
  return &found->second;
}

// The places stay known: others of them may be lent now, and what lies there has to be found
// before DDP writes.
void GradientPlaceTable::move_away(const GradientPlace& place) {
  c10::StorageImpl* const storage = place.part.storage().unsafeGetStorageImpl();
  std::vector<Lent*> within;
  for (auto& [address, lent] : lent_) {
    if (is_within(address, *storage)) {
      within.push_back(&lent);
    }
  }
  Memory old = std::make_shared<c10::DataPtr>(move_storage(storage));
  for (Lent* const lent : within) {
    lent->memory = old;
  }
  // NumPy arrays of gradients, which know nothing but the address, stay readable.
  left_behind_[place.model].push_back(std::move(old));
}

void GradientPlaceTable::add_size(const GradientPlace& place) {
  Sizes& sizes = place.device.is_cpu() ? on_cpu_ : on_gpu_;
  sizes.words[word_of(place.bytes)].fetch_or(bit_of(place.bytes), std::memory_order_relaxed);
}

}  // namespace horon::torch_backend
