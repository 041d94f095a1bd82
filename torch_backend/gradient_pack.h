// Small gradients, side by side in one buffer: moved there in C++, since a loop in Python would
// take longer than their reduction.
//
// Note [Packed while they are warm]
// A gradient is copied as soon as autograd has made it, not when all of a bucket are there: the
// caches still hold it, and its memory is free for the next one, which is made where the caches
// hold that. See docs/performance.md, "Copies".
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace horon::torch_backend {

// Thread safety: one thread at a time.
class GradientPack {
 public:
  // The place of each parameter's gradient: a view of the buffer.
  GradientPack(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& views);

  std::size_t size() const { return places_.size(); }

  // The view that is, or becomes, a parameter's gradient. See Note [Gradients that have moved] in
  // python/horon/torch/_gradient_parts.py.
  const at::Tensor& view(std::size_t index) const { return places_.at(index).view; }

  // Moves a gradient that autograd has just made, if it is on the CPU and a copy is all it needs;
  // pack() comes by others. See Note [Packed while they are warm].
  void move_early(std::size_t index);

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
    at::Tensor home;  // nobody else's, so that it stays where it is
    at::Tensor view;

    void renew_view();
  };

  std::vector<Place> places_;
};

}  // namespace horon::torch_backend
