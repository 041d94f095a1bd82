// Gradients that autograd makes right in the buckets of DistributedDataParallel.
//
// Note [Gradients in their places]
// With gradient_as_bucket_view=True a parameter's .grad is a part of a bucket, into which DDP
// copies what the backward pass has made elsewhere. The copy is saved by making the gradient in its
// place to begin with:
// 1. The wrapped CPU allocator (Note [Gradients in the arena]), asked for memory of a gradient's
//    size in a backward pass, looks for which parameters the node that runs makes gradients, and
//    lends the place of one that has none yet.
// 2. A hook sees the gradient before autograd stores it. If it lies in its place and is nobody
//    else's, the hook makes it a view of the bucket, and DDP finds nothing to copy.
// 3. The memory may have been asked for by something else of that size, an intermediate result,
//    which may live on. Then the hook moves the bucket to other memory, before DDP writes into the
//    place, and what lies there stays as it is. No gradient of that size of that model is made in
//    its place from then on.
// DDP writes into a place, or reduces it, only after that hook.
// 4. Gradients that the caller still holds from the last step lie in the places too, and stay as
//    they are through a backward pass that DDP does not take part in, as in no_sync(). So places
//    are lent only between a forward pass after which DDP will write there and the end of its
//    backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <vector>

namespace horon::torch_backend {

// The places of one model. Thread safety: one thread at a time, for one object.
class GradientPlaces {
 public:
  GradientPlaces();
  ~GradientPlaces();
  GradientPlaces(const GradientPlaces&) = delete;
  GradientPlaces& operator=(const GradientPlaces&) = delete;

  // From now on the parameters' gradients belong into these parts of a bucket, of the same sizes,
  // by index. Small ones, and those of parameters that are not contiguous, are made elsewhere.
  void set(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& parts);

  // Whether places are lent; not at first. Thread safety: any thread.
  void set_lending(bool is_lending) { is_lending_.store(is_lending, std::memory_order_relaxed); }
  bool is_lending() const { return is_lending_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> is_lending_{false};
};

// For the allocator; thread safety: all.

// No place is smaller.
std::size_t least_place_bytes();

// The place for what the backward pass allocates right now; null: anywhere.
void* lend_place(std::size_t bytes);

// What lies there is freed. False: it is no place.
bool give_place_back(void* address);

}  // namespace horon::torch_backend
