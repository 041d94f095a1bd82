// DDP's gradients as the caller's own tensors, although they lie in its buckets.
//
// Note [Own gradients]
// Without gradient_as_bucket_view a .grad is the caller's own: who keeps one over zero_grad() finds
// it as it was after the next step, and whatever tensor it is, a part of a flat one, say, it stays
// that tensor. DDP pays for that with a copy into its bucket and one back. With views it copies
// only what has no memory in common with the bucket, but puts its views in place of .grad. So DDP
// is made to work with views, and this undoes what is different:
// 1. A gradient that is made in its place (Note [Gradients in their places]) gets a storage of its
//    own, which has the memory in common with the bucket's in the way of torch's RefcountedDeleter.
//    So DDP takes it for a view, and copies nothing.
// 2. Who keeps such a gradient is found by that storage, if it lives on, but is not the parameter's
//    .grad any more. When a backward pass begins, before anything is written, or given a place,
//    buckets with such storages get other memory, and the keepers have the old. In the middle of a
//    pass the storage gets other memory instead. Gradients of that parameter are not made in their
//    place from then on.
// 3. A .grad that lies in a bucket, but not in its place (`a.grad = b.grad`), is copied before DDP
//    can take it for a view.
// 4. Every other .grad is remembered as it is when DDP comes to see it. DDP copies it and puts its
//    view in its place; after the pass it gets the result, and is put back, as without views. What
//    DDP does to it when it lays out its buckets anew, in a forward pass, is undone at once.
// A pass, here, begins with the first gradient that is stored after a forward pass, and ends when
// DDP has reduced everything: it may consist of several backward passes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gradient_places.h"

namespace horon::torch_backend {

// The gradients of one model. Thread safety: one thread at a time.
class OwnGradients final : public std::enable_shared_from_this<OwnGradients> {
 public:
  // `parameters`: those that DDP reduces.
  explicit OwnGradients(std::vector<at::Tensor> parameters);
  ~OwnGradients();
  OwnGradients(const OwnGradients&) = delete;
  OwnGradients& operator=(const OwnGradients&) = delete;

  // Whether anybody but one DDP model looks at what is stored: another one would see the first
  // one's views, and the other way round.
  static bool are_shared(const std::vector<at::Tensor>& parameters);

  const std::shared_ptr<GradientPlaces>& places() const { return places_; }

  // Has the parameters tell what is stored. To be called once, before DDP does the same.
  void watch();

  // Before a forward pass, and when DDP has done what it does at the beginning of one.
  void begin_forward();
  void end_rebuild();

  // Called before a gradient is stored, and after that, and after all hooks of the parameter's.
  void begin_pass();
  void see(std::size_t parameter);

  // To be called in a backward pass when DDP has reduced everything. Does what is to be done after
  // it, and after all that DDP does at its end.
  void end_after_backward();

 private:
  void end_pass();
  // Returns what DDP will see.
  const at::Tensor& separate(std::size_t parameter);

  const std::vector<at::Tensor> parameters_;
  const std::shared_ptr<GradientPlaces> places_;
  std::vector<at::Tensor> before_forward_;  // for each parameter; empty: nothing has to be undone
  std::vector<at::Tensor> seen_;            // for each parameter, in a pass
  std::vector<std::uintptr_t> see_hooks_;
  bool is_in_pass_ = false;
};

}  // namespace horon::torch_backend
