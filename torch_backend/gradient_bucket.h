// Gradients that go out together, just as they are, sent from C++ as soon as the last one is there.
//
// Note [Sent without Python]
// After the kernels of a backward pass the caches hold nothing of the interpreter: sending a bucket
// from Python took 80 us there. Python sends what needs more than a few checks: gradients that are
// missing, sparse, compressed or in a group of the user's.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient_pack.h"
#include "named/part_maker.h"
#include "named_engine_host.h"

namespace horon::torch_backend {

// Thread safety: one thread at a time, with the GIL or without.
class GradientBucket {
 public:
  // What all ranks call it, and what is to be done with it.
  struct Order {
    std::string name;
    Reduced how;
  };

  // The gradient of one parameter, where autograd has put it, if with these strides, the same on
  // all ranks.
  GradientBucket(Order order, at::Tensor parameter, std::vector<std::int64_t> strides);
  // Several, packed into `buffer`, which is contiguous.
  GradientBucket(Order order, std::shared_ptr<GradientPack> pack, at::Tensor buffer);

  // The engine of now, and the process set's number there; the one of before may have been shut
  // down.
  void set_engine(const std::shared_ptr<NamedEngineHost>& host, int process_set) {
    host_ = host;
    process_set_ = process_set;
  }

  // Sends it, and meets the other ranks for it where that is worth it; on a GPU, in the order of
  // the current stream, where the gradients are ready. False if it has to go from Python, whose
  // errors say why. See Note [Sent without Python].
  bool try_send();
  // Of one parameter's, on a CPU: calls `make` until all of `gradient` is made, which becomes the
  // parameter's, and sends it meanwhile, if that is faster; else try_send() has to follow. See Note
  // [Products of gradients] in gradient_product.h.
  void make(const at::Tensor& gradient, PartMaker::Make make);
  // Whether it was sent when it was made, and not settled since.
  bool is_made() const { return out_ && out_->is_made; }
  // How often it was sent so.
  std::int64_t n_made() const { return n_made_; }
  // It has become the parameter's gradient. Throws c10::Error if something else has: what came to
  // the parameter was not the gradient that is out. receive() throws then, too.
  void settle_made(const at::Tensor& came);
  bool is_out() const { return out_.has_value(); }
  // Requires is_out(). Blocks until it is reduced, and makes the reduced gradients the parameters',
  // whatever has become of these meanwhile; again, nothing. Throws the operation's error. It is out
  // until reset(), so that a wait for several that was interrupted can be begun again.
  void receive();
  // Forgets what is out.
  void reset() { out_.reset(); }

 private:
  struct Out {
    std::shared_ptr<NamedEngineHost> host;
    std::uint64_t handle = 0;
    at::Tensor gradient;                   // of one parameter
    at::Tensor sent;                       // its memory of then
    std::shared_ptr<NamedOperation> done;  // if it was done, with or without success, when sent
    bool is_received = false;
    bool is_made = false;  // sent before it was the parameter's
    bool is_lost = false;  // and something else became that
  };

  // What to reduce, or undefined.
  at::Tensor tensor_to_send();
  void put_back(const Out& out);

  const Order order_;
  const c10::Device device_;
  const at::Tensor parameter_;  // of one gradient
  const std::vector<std::int64_t> strides_;
  const std::shared_ptr<GradientPack> pack_;  // of several
  const at::Tensor buffer_;
  std::weak_ptr<NamedEngineHost> host_;  // which ends with shutdown(), not with the optimizer
  int process_set_ = 0;
  std::optional<std::chrono::steady_clock::time_point> began_;  // to be made, if that is compared
  std::optional<Out> out_;
  std::int64_t n_made_ = 0;
};

}  // namespace horon::torch_backend
