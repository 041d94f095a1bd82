// Gradients that autograd makes right in the buckets that they are reduced in: those of
// DistributedDataParallel, and those of DistributedOptimizer.
//
// Note [Gradients in their places]
// DDP copies what the backward pass has made elsewhere into a bucket, and without
// gradient_as_bucket_view back. DistributedOptimizer's packs do the same (decision 0027). The
// copies are saved by making the gradient in its place to begin with:
// 1. The wrapped allocator (Note [Gradients in the arena]; on GPUs, Note [Gradients on GPUs] in
//    cuda/gradient_cuda_allocator.h), asked for memory of a gradient's size in a backward pass,
//    looks for which parameters the node that runs makes gradients. It learns which of the node's
//    allocations of that size becomes the gradient, and from the next pass on lends the place of a
//    parameter that has none yet to just that one. Where a parameter is used several times, the
//    nodes that make parts of its gradient, and its sum, are told apart by their order.
// 2. With DDP, a hook sees the gradient before autograd stores it. If it lies in its place and is
//    nobody else's, the hook makes it a view of the bucket, or, without gradient_as_bucket_view,
//    a tensor that DDP takes for one (Note [Own gradients] in own_gradients.h), and nothing is left
//    to copy. In a pack it stays an ordinary tensor until the pack comes to write
//    (GradientPack::settle): a hook of the user's may keep it, and a gradient that others have,
//    too, is copied when it is stored, which copy is then made in the place.
// 3. A node may behave differently the next time, so that something else lies in the place, an
//    intermediate result, which may live on; or the gradient may be kept by somebody. Then the
//    bucket gets other memory, before anything is written into the place, and what lies there stays
//    as it is. No gradient of that size of that model is made in its place from then on.
// 4. Gradients that the caller still holds from the last step lie in the places too. With DDP they
//    stay as they are through a backward pass that it does not take part in, as in no_sync():
//    places are lent only between a forward pass after which DDP will write there and the end of
//    its backward pass. A pack's are set aside before the first place of a step is lent, and only
//    the first gradient of a parameter in a step is made there (Note [Gradients that somebody
//    keeps]).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "gradient_loan.h"
#include "gradient_pack.h"

namespace horon::torch_backend {

// What DDP's gradients are.
enum class DdpGradients {
  kViews,   // of its buckets: gradient_as_bucket_view=True
  kOwn,     // the caller's own tensors, in its buckets: Note [Own gradients] in own_gradients.h
  kCopied,  // the caller's own tensors, elsewhere; these have no places
};

// The places of one model. Thread safety: one thread at a time, for one object.
class GradientPlaces {
 public:
  // Whose gradients they are; for packs.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Called in a backward pass that would make a gradient in its place while places are not lent;
    // may change memory, and set_lending().
    virtual void begin_step() = 0;
    // Whether the gradient of a parameter, by the index given to set(), may be made there now.
    virtual bool may_lend(std::size_t index) const = 0;
  };

  explicit GradientPlaces(std::weak_ptr<Owner> owner);
  explicit GradientPlaces(DdpGradients gradients);
  ~GradientPlaces();
  GradientPlaces(const GradientPlaces&) = delete;
  GradientPlaces& operator=(const GradientPlaces&) = delete;

  // From now on the parameters' gradients belong into these parts of a bucket, of the same sizes,
  // by index. Small ones, and those of parameters that are not contiguous, are made elsewhere.
  void set(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& parts);

  // The same for one parameter, and its place in a pack that has its memory for itself; of any
  // size.
  void set(std::size_t index, const at::Tensor& parameter, std::shared_ptr<GradientPack> pack,
           std::size_t index_in_pack);

  // Whether places are lent; not at first. Thread safety: any thread.
  void set_lending(bool is_lending) { is_lending_.store(is_lending, std::memory_order_relaxed); }
  bool is_lending() const { return is_lending_.load(std::memory_order_relaxed); }

  std::shared_ptr<Owner> owner() const { return owner_.lock(); }
  DdpGradients gradients() const { return gradients_; }

  // For own gradients; see Note [Own gradients] in own_gradients.h, which says what a pass is.
  // Leaves memory to whom keeps gradients of earlier passes. Once in a pass, before anything of it
  // is stored.
  void begin_pass() const;
  void end_pass() const;
  // Whether the parameter's gradient is DDP's view, or lies in a bucket where it does not belong.
  bool is_misplaced(const at::Tensor& parameter, const at::Tensor& gradient) const;
  // What was made in the place, but is not the parameter's gradient any more, gets other memory.
  void give_way(const at::Tensor& parameter) const;

 private:
  std::atomic<bool> is_lending_{false};
  const std::weak_ptr<Owner> owner_;
  const DdpGradients gradients_ = DdpGradients::kViews;
};

// For the allocators; thread safety: all.

// False: there is no place of that size. True: there may be one.
bool may_have_place(std::size_t bytes, c10::DeviceType type);

// The place for what the backward pass allocates right now; null: anywhere, and then
// made_elsewhere() has to be told where, before this thread allocates again.
c10::DataPtr lend_place(std::size_t bytes, c10::Device device);
void made_elsewhere(const void* address);

// What was lent is ordinary memory from now on: the pack gets other memory. Returns what holds it.
c10::Storage leave_place(GradientLoan& loan);

// For packs: what the parameter's gradient has become in this step, if it was not made in its
// place.
void note_stored(const at::Tensor& parameter);

// For packs, where something lies in its memory that is not a view of it: no gradient of that size
// is made in its place from now on.
void forsake_places(const GradientPack& pack);

}  // namespace horon::torch_backend
