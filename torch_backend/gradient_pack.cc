#include "gradient_pack.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "gradient_places.h"
#include "lies_in_place.h"
#include "process_arena.h"
#ifdef HORON_CUDA
#include "cuda/device_copies.h"
#endif

namespace horon::torch_backend {
namespace {

// Whether memory can be copied as it is.
bool has_same_layout(const at::Tensor& from, const at::Tensor& to) {
  return from.device() == to.device() && from.scalar_type() == to.scalar_type() &&
         from.sizes() == to.sizes() && from.strides() == to.strides() &&
         from.is_non_overlapping_and_dense() && !from.is_neg() && !from.is_conj();
}

// Copies within a GPU, which go together.
class DeviceCopies {
 public:
  bool add(const at::Tensor& from, const at::Tensor& to) {
#ifdef HORON_CUDA
    if (from.is_cuda() && (held_.empty() || held_.front().device() == from.device())) {
      copies_.push_back({reinterpret_cast<std::uint64_t>(from.const_data_ptr()),
                         reinterpret_cast<std::uint64_t>(to.mutable_data_ptr()), to.nbytes()});
      held_.push_back(from);
      return true;
    }
#endif
    (void)from;
    (void)to;
    return false;
  }

  void run() {
#ifdef HORON_CUDA
    if (!held_.empty()) {
      copy_on_device(copies_, held_.front().device());
    }
#endif
  }

 private:
#ifdef HORON_CUDA
  std::vector<ByteCopy> copies_;
  std::vector<at::Tensor> held_;  // their memory may be used again as soon as they are let go
#endif
};

bool needs_only_a_copy(const at::Tensor& gradient) {
  return gradient.layout() == c10::kStrided && !gradient.requires_grad();
}

// Without elements there may be no memory.
bool can_copy_bytes(const at::Tensor& gradient, const at::Tensor& view) {
  return view.is_cpu() && view.numel() > 0 && has_same_layout(gradient, view);
}

void copy_bytes(const at::Tensor& gradient, const at::Tensor& view) {
  std::memcpy(view.mutable_data_ptr(), gradient.const_data_ptr(), view.nbytes());
}

}  // namespace

GradientPack::GradientPack(const std::vector<at::Tensor>& parameters, at::Tensor buffer,
                           const std::vector<at::Tensor>& views)
    : buffer_(std::move(buffer)) {
  TORCH_CHECK_VALUE(parameters.size() == views.size(), "horon: ", parameters.size(),
                    " parameters but ", views.size(), " views.");
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    places_.push_back({parameters[i], views[i].sizes().vec(), views[i].strides().vec(),
                       views[i].storage_offset(), std::make_shared<GradientLoan>()});
  }
}

at::Tensor GradientPack::view(const Place& place) const {
  // As alias() does, without telling autograd.
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(buffer_.storage()), buffer_.key_set(), buffer_.dtype());
  c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(place.offset);
  impl->set_sizes_and_strides(place.sizes, place.strides);
  return view;
}

void* GradientPack::address(const Place& place) const {
  const auto bytes = static_cast<std::size_t>(place.offset) * buffer_.element_size();
  return static_cast<std::byte*>(buffer_.storage().mutable_data()) + bytes;
}

bool GradientPack::is_in(const Place& place, const at::Tensor& gradient) const {
  return gradient.defined() && gradient.has_storage() &&
         gradient.storage().is_alias_of(buffer_.storage()) &&
         gradient.storage_offset() == place.offset && gradient.sizes() == place.sizes &&
         gradient.strides() == place.strides && gradient.scalar_type() == buffer_.scalar_type();
}

bool GradientPack::has_gradients() const {
  return std::any_of(places_.begin(), places_.end(),
                     [this](const Place& place) { return is_in(place, place.parameter.grad()); });
}

void GradientPack::move_to(const c10::Storage& storage) {
  buffer_.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
}

bool GradientPack::has_own_memory() const {
  return buffer_.storage_offset() == 0 && buffer_.storage().nbytes() == buffer_.nbytes();
}

at::Tensor GradientPack::new_memory() const {
  if (buffer_.is_cpu() && is_in_arena(buffer_)) {
    try {
      return empty_in_arena(buffer_.sizes(), buffer_.scalar_type()).zero_();
    } catch (const c10::OutOfMemoryError&) {
      return at::zeros(buffer_.sizes(), buffer_.options());  // reduced from elsewhere, with copies
    }
  }
  return at::zeros(buffer_.sizes(), buffer_.options());
}

void GradientPack::leave_memory() {
  const at::NoGradGuard no_grad;
  move_to(new_memory().storage());
  stream_ = current_stream();
}

void GradientPack::avoid_others() {
  const auto has_other = [this](const Place& place) {
    return place.loan->is_unsettled_at(address(place));
  };
  if (has_own_memory() && std::any_of(places_.begin(), places_.end(), has_other)) {
    forsake_places(*this);
    leave_memory();
  }
}

bool GradientPack::has_kept_view() const {
  if (buffer_.storage().use_count() <= kOwnUses) {
    return false;
  }
  const auto n_in_place = static_cast<std::size_t>(
      std::count_if(places_.begin(), places_.end(),
                    [this](const Place& place) { return is_in(place, place.parameter.grad()); }));
  return n_in_place < places_.size() &&
         buffer_.storage().use_count() > kOwnUses + n_in_place + (is_settling_ ? 1 : 0);
}

c10::Stream GradientPack::current_stream() const {
  return c10::impl::VirtualGuardImpl(buffer_.device().type()).getStream(buffer_.device());
}

bool GradientPack::may_lend_on_current_stream() {
  if (buffer_.is_cpu()) {
    return true;
  }
  const c10::Stream now = current_stream();
  if (!stream_) {
    stream_ = now;
  }
  return *stream_ == now;
}

void GradientPack::settle(std::size_t index, std::size_t n_known) {
  const Place& place = places_[index];
  at::Tensor& gradient = place.parameter.mutable_grad();
  if (is_in(place, gradient) || address_of(gradient) != address(place)) {
    return;
  }
  at::Tensor view = this->view(place);
  if (lies_in_place(gradient, view) && torch::autograd::impl::is_tensor_stealable(gradient) &&
      gradient.storage().use_count() == 1 + n_known) {
    place.loan->settle();
    is_settling_ = is_settling_ || n_known > 0;
    gradient = std::move(view);
  }
}

void GradientPack::settle_all() {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    settle(i);
  }
}

void GradientPack::watch(std::size_t index) {
  const Place& place = places_.at(index);
  const at::Tensor& gradient = place.parameter.grad();
  if (!gradient.defined() || is_in(place, gradient)) {
    return;
  }
  const bool is_as_learned =
      place.loan->address() == address(place) && address_of(gradient) == address(place);
  if (!is_as_learned) {
    note_stored(place.parameter);
  }
}

void GradientPack::came(std::size_t index) {
  const Place& place = places_.at(index);
  at::Tensor& gradient = place.parameter.mutable_grad();
  if (is_kept_ || !gradient.defined() || is_in(place, gradient) ||
      place.loan->address() == address(place) || !buffer_.is_cpu() ||
      !needs_only_a_copy(gradient)) {
    return;
  }
  at::Tensor view = this->view(place);
  if (can_copy_bytes(gradient, view)) {
    copy_bytes(gradient, view);
    gradient = std::move(view);
  }
}

std::vector<std::int64_t> GradientPack::pack() {
  const at::NoGradGuard no_grad;
  settle_all();
  avoid_others();
  if (has_own_memory() && has_kept_view()) {
    leave_memory();
  }
  is_settling_ = false;
  std::vector<std::int64_t> others;
  DeviceCopies on_device;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    at::Tensor& gradient = place.parameter.mutable_grad();
    if (is_in(place, gradient)) {
      continue;
    }
    const at::Tensor view = this->view(place);
    if (!gradient.defined()) {
      view.zero_();
    } else if (!needs_only_a_copy(gradient)) {
      others.push_back(static_cast<std::int64_t>(i));
      continue;
    } else if (can_copy_bytes(gradient, view)) {
      copy_bytes(gradient, view);
    } else if (!has_same_layout(gradient, view) || !on_device.add(gradient, view)) {
      view.copy_(gradient);
    }
    gradient = view;
  }
  on_device.run();
  return others;
}

void GradientPack::put_back() {
  const at::NoGradGuard no_grad;
  for (const Place& place : places_) {
    const at::Tensor& parameter = place.parameter;
    at::Tensor& gradient = parameter.mutable_grad();
    if (parameter.scalar_type() != buffer_.scalar_type() ||
        parameter.device() != buffer_.device()) {
      gradient = view(place).to(parameter.device(), parameter.scalar_type());
    } else if (!is_in(place, gradient)) {
      gradient = view(place);
    }
  }
}

void GradientPacks::set(std::vector<std::shared_ptr<GradientPack>> packs) {
  memories_.clear();
  for (std::shared_ptr<GradientPack>& pack : packs) {
    const c10::Storage& storage = pack->buffer().storage();
    auto memory = std::find_if(memories_.begin(), memories_.end(), [&](const Memory& known) {
      return known.storage.is_alias_of(storage);
    });
    if (memory == memories_.end()) {
      memory = memories_.insert(memories_.end(), Memory{storage, {}, 0});
    }
    if (std::find(memory->packs.begin(), memory->packs.end(), pack) == memory->packs.end()) {
      memory->packs.push_back(std::move(pack));
    }
  }
  for (Memory& memory : memories_) {
    memory.own_uses = memory.storage.use_count();
  }
}

void GradientPacks::set_aside_kept() {
  for (Memory& memory : memories_) {
    for (const std::shared_ptr<GradientPack>& pack : memory.packs) {
      pack->begin_step();
    }
    memory.follow();
    if (memory.is_kept()) {
      memory.set_aside();
      ++n_set_aside_;
    }
    for (const std::shared_ptr<GradientPack>& pack : memory.packs) {
      pack->look_for_kept();
    }
  }
}

// Its pack, if it has the memory for itself, may have left it.
void GradientPacks::Memory::follow() {
  if (packs.size() != 1) {
    return;
  }
  packs.front()->settle_all();  // gradients of a step that was given up
  packs.front()->avoid_others();
  if (const c10::Storage& now = packs.front()->buffer().storage(); !now.is_alias_of(storage)) {
    storage = now;
    own_uses = GradientPack::kOwnUses;
  }
}

bool GradientPacks::Memory::is_kept() const {
  return storage.use_count() > own_uses &&
         std::none_of(packs.begin(), packs.end(), [](const std::shared_ptr<GradientPack>& pack) {
           return pack->has_gradients();
         });
}

void GradientPacks::Memory::set_aside() {
  const at::NoGradGuard no_grad;
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  at::Tensor copy =
      at::empty({0}, at::TensorOptions().dtype(at::kByte).device(packs.front()->buffer().device()));
  copy.set_(storage, 0, {bytes}, {1});
  copy = copy.clone();
  // All who hold the old storage see the copy from now on, in the same tensors.
  c10::StorageImpl* const old = storage.unsafeGetStorageImpl();
  c10::StorageImpl* const copied = copy.storage().unsafeGetStorageImpl();
  c10::DataPtr copied_memory = copied->set_data_ptr(c10::DataPtr(nullptr, copy.device()));
  c10::DataPtr memory = old->set_data_ptr(std::move(copied_memory));
  storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(bytes), std::move(memory),
      old->allocator(), old->resizable()));
  for (const std::shared_ptr<GradientPack>& pack : packs) {
    pack->move_to(storage);
    pack->may_lend_on_current_stream();  // that of the copy
  }
  own_uses = storage.use_count();
}

}  // namespace horon::torch_backend
