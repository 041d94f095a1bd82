// DDP's gradients as the caller's own tensors, although they lie in its buckets.
//
// Note [Own gradients]
// Without gradient_as_bucket_view a .grad is the caller's own: who keeps one over zero_grad() finds
// it as it was after the next step, and one that the caller has assigned, a part of a flat tensor,
// say, stays that tensor. DDP pays for that with a copy into its bucket and one back. With views it
// copies only what has no memory in common with the bucket, but puts its views in place of .grad.
// So DDP is made to work with views, and this makes gradients of the caller's own out of them:
// 1. What belongs to a gradient is a storage of its own, which has the memory in common with the
//    bucket's in the way of torch's RefcountedDeleter. So DDP takes it for a view. A gradient that
//    is not made in its place (Note [Gradients in their places]) is copied there before autograd
//    stores it.
// 2. The memory that somebody keeps is found by its storage: one that was made for a parameter's
//    gradient and lives on, but is not the parameter's .grad any more. Before anything of a
//    backward pass is written, or given a place, buckets with such storages get other memory, and
//    the keepers have the old. Gradients of that parameter are not made in their place from then
//    on. The same is done where a .grad lies in a bucket, but not in its place (`a.grad = b.grad`),
//    which DDP would take for its view.
// 3. A .grad from elsewhere that is there when a backward pass begins is remembered. DDP puts its
//    view in its place; after the pass it gets the result, and is put back. What DDP does when it
//    lays its buckets out anew, in a forward pass, is undone at the end of that.
// 4. Other views that DDP has left (where a parameter was used on another rank only) become
//    storages as in 1 after the pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "gradient_places.h"

namespace horon::torch_backend {

// The gradients of one model, whose places are GradientPlaces with DdpGradients::kOwn. Thread
// safety: one thread at a time.
class OwnGradients final : public std::enable_shared_from_this<OwnGradients> {
 public:
  OwnGradients(std::vector<at::Tensor> parameters, std::shared_ptr<GradientPlaces> places);

  // Has the parameters tell when a backward pass begins. To be called once.
  void watch();

  // Around a forward pass.
  void begin_forward();
  void end_forward();

  // Called before the first gradient of a backward pass is stored; does nothing after that.
  void begin_backward();

  // To be called in a backward pass that DDP reduces. Does what is to be done after it, and after
  // all that DDP does at its end.
  void end_after_backward();

 private:
  void end_backward();

  const std::vector<at::Tensor> parameters_;
  const std::shared_ptr<GradientPlaces> places_;
  std::vector<at::Tensor> before_forward_;   // for each parameter; empty: in no forward pass
  std::vector<at::Tensor> before_backward_;  // for each parameter: from elsewhere
  int graph_task_ = -1;
};

}  // namespace horon::torch_backend
