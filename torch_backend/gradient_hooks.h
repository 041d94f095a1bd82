// Counts the gradients of a model as the backward pass makes them, and says when those that travel
// together are complete. In C++, because a hook in Python would cost more than small gradients do.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gradient_bucket.h"
#include "gradient_pack.h"

namespace horon::torch_backend {

// Thread safety: one thread at a time, with the GIL held, or in a backward pass of the parameters.
// Ownership: the hooks are taken off the parameters when it dies.
class GradientHooks {
 public:
  // What to call, and with what: lay_out() before the first gradient goes out, which has to call
  // set_buckets(); send(bucket) when the last gradient of a bucket is there; refuse() for a
  // gradient that comes again before reset(), which has to raise.
  struct Callbacks {
    pybind11::function lay_out;
    pybind11::function send;
    pybind11::function refuse;
  };

  // A gradient counts after `passes` backward passes.
  GradientHooks(const std::vector<at::Tensor>& parameters, int passes, Callbacks callbacks);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Where a small gradient is moved as soon as it is there: a pack, and its index in it.
  using Place = std::pair<std::shared_ptr<GradientPack>, std::size_t>;

  // What sends a bucket, if not Python; may be null.
  using SharedBucket = std::shared_ptr<GradientBucket>;

  // The bucket of each parameter, from 0 on, and its place, if it has one; then, by bucket, what
  // sends it.
  void set_buckets(const std::vector<int>& bucket_of, std::vector<std::optional<Place>> place_of,
                   std::vector<SharedBucket> buckets);
  // Before a step changes the packs: called by the first gradient that comes, and before gradients
  // are sent of which none has come. Again, nothing. See Note [Gradients that somebody keeps] in
  // gradient_pack.h.
  void begin_step();
  std::int64_t n_set_aside() const;
  // The buckets that have not gone out from here; after set_buckets().
  std::vector<int> not_sent() const;
  // Waits for those that have, and makes the reduced gradients the parameters'. Throws the first
  // error of an operation, when all have ended; may be called without the GIL.
  void receive();
  // Begins again, for the next step; forgets what is out.
  void reset(int passes);
  // Whether a gradient has come since reset().
  bool has_gradients() const;

 private:
  struct State;
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Hook {
    Accumulator accumulator;  // which lives only while somebody holds it
    std::uintptr_t key;
  };

  // See Note [Gradients in their places] in gradient_places.h.
  void lend_places();
  // See Note [Products of gradients] in gradient_product.h.
  void watch_products_of_buckets();

  const std::shared_ptr<State> state_;
  std::vector<Hook> hooks_;
};

}  // namespace horon::torch_backend
