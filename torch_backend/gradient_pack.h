// Small gradients, side by side in one buffer: moved there in C++, since a loop in Python would
// take longer than their reduction.
//
// Note [Packed while they are warm]
// A gradient is copied as soon as autograd has made it, not when all of a bucket are there: the
// caches still hold it, and its memory is free for the next one, which is made where the caches
// hold that. See docs/performance.md, "Copies".
//
// Note [Gradients that somebody keeps]
// In plain PyTorch each backward pass after zero_grad(set_to_none=True) makes new gradients, and a
// script may keep those of an earlier one, to compare tasks or steps. Here they lie at the same
// place each time. So a parameter's gradient is a tensor made for it, which nothing here holds on
// to; and where the buffer's memory has other holders when a step begins, they get a copy of it,
// while the buffer goes on with the memory. Where a parameter still has its gradient of before, to
// be accumulated in place, nothing is done: what shares its memory is meant to follow.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gradient_loan.h"

namespace horon::torch_backend {

// Thread safety: one thread at a time.
class GradientPack {
 public:
  // The place of each parameter's gradient: a view of the buffer, which is contiguous.
  GradientPack(const std::vector<at::Tensor>& parameters, at::Tensor buffer,
               const std::vector<at::Tensor>& views);

  std::size_t size() const { return places_.size(); }

  const at::Tensor& buffer() const { return buffer_; }

  // What is, or becomes, a parameter's gradient: a new tensor, which autograd takes for nobody's
  // view, so that detach_() works. See Note [Gradients that have moved] in
  // python/horon/torch/_gradient_parts.py.
  at::Tensor view(std::size_t index) const { return view(places_.at(index)); }

  // Where a parameter's gradient lies now.
  void* address(std::size_t index) const { return address(places_.at(index)); }

  // Of that place, to whatever makes a gradient there.
  const std::shared_ptr<GradientLoan>& loan(std::size_t index) const {
    return places_.at(index).loan;
  }

  // Whether some parameter's gradient lies in its place.
  bool has_gradients() const;

  // From now on the buffer has this memory.
  void move_to(const c10::Storage& storage);

  // Whether nothing but the buffer is in its memory.
  bool has_own_memory() const;

  // The buffer gets other memory, and nothing of what it held: what lies in its present memory
  // stays there. Requires has_own_memory().
  void leave_memory();

  // How often its storage is used where it has its memory for itself and no gradient is in it: by
  // the buffer, and by GradientPacks.
  static constexpr std::size_t kOwnUses = 2;

  // Leaves its memory if something lies there that is no view of it; before it is written. See Note
  // [Gradients in their places] in gradient_places.h.
  void avoid_others();

  // Whether a place may be lent to what runs on the current stream: in each step one stream has
  // all that are lent, since places are not ordered between streams.
  bool may_lend_on_current_stream();
  void begin_step() {
    stream_.reset();
    is_settling_ = false;
  }
  // After begin_step(), when what scripts keep was set aside. Where it could not be, since other
  // gradients are to be accumulated beside it, is_kept() says so for the step: nothing is written
  // there before pack() has taken other memory.
  void look_for_kept() { is_kept_ = has_own_memory() && has_kept_view(); }
  bool is_kept() const { return is_kept_; }

  // Makes a gradient a view if it was made in its place and has no other owners but `n_known` ones
  // of its memory.
  void settle(std::size_t index, std::size_t n_known = 0);
  void settle_all();

  // Autograd has just stored a gradient for the first time in a step: learns from where it is made.
  void watch(std::size_t index);

  // Autograd has just stored a gradient that is to go out: moves it, if it is on the CPU, not there
  // already, and a copy is all it needs; pack() comes by others. See Note [Packed while they are
  // warm].
  void came(std::size_t index);

  // Copies each parameter's gradient into its view and makes the view the gradient; a missing one
  // becomes zeros. Leaves those that are their views already. Returns the indices of gradients that
  // need more than a copy (sparse ones, those with a graph), untouched.
  std::vector<std::int64_t> pack();

  // Makes each view its parameter's gradient again, where something else has become that; a copy,
  // where the parameter has another dtype or device by now.
  void put_back();

 private:
  struct Place {
    at::Tensor parameter;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    std::int64_t offset;  // in elements, from the start of the storage
    std::shared_ptr<GradientLoan> loan;
  };

  void* address(const Place& place) const;
  at::Tensor view(const Place& place) const;
  at::Tensor new_memory() const;
  // Whether a gradient lies in its place.
  bool is_in(const Place& place, const at::Tensor& gradient) const;

  c10::Stream current_stream() const;
  // Whether something is to be written, and somebody has a view that is no parameter's gradient any
  // more.
  bool has_kept_view() const;

  const at::Tensor buffer_;
  std::vector<Place> places_;
  std::optional<c10::Stream> stream_;  // that has what is lent in this step
  bool is_settling_ = false;           // what a view was made of is still there
  bool is_kept_ = false;               // see look_for_kept()
};

// The packs of one model, which may share memory. Thread safety: one thread at a time.
class GradientPacks {
 public:
  // Requires: nobody but the packs' owners has tensors in their buffers yet.
  void set(std::vector<std::shared_ptr<GradientPack>> packs);

  // Before a step changes a buffer; see Note [Gradients that somebody keeps].
  void set_aside_kept();
  // How often memory was copied for that.
  std::int64_t n_set_aside() const { return n_set_aside_; }

 private:
  struct Memory {
    c10::Storage storage;
    std::vector<std::shared_ptr<GradientPack>> packs;
    std::size_t own_uses = 0;  // of the storage, while no gradient is in it

    void follow();
    bool is_kept() const;
    void set_aside();
  };

  std::vector<Memory> memories_;
  std::int64_t n_set_aside_ = 0;
};

}  // namespace horon::torch_backend
