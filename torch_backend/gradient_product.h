// Matrix products that make a parameter's gradient, so that it can be reduced part by part.
//
// Note [Products of gradients]
// The gradient of a linear layer's weight is one product, mm(), in the backward pass: of rows that
// can be made one after another (Note [Made in parts] in named/part_maker.h). So that we are asked
// to make it, the kernel of aten::mm for CPUs is ours, from when the first parameter is watched; it
// passes everything else on to torch's, which makes the rows as well.
//
// What is reduced before the backward pass has done with it must be the gradient, as a whole, and
// seen by nobody else. So a product counts as a parameter's only
// - in the node of a product whose factor the parameter is, by itself or transposed, and only if
//   the gradient of the other factor, if one is wanted, can not have its shape;
// - if nothing else adds to it: the graph has no other edge to the parameter, nor to its transpose
//   (another graph may: that is for its owner to know);
// - if there is no hook on the way, of the nodes or of the parameter, and the parameter has no
//   gradient yet;
// - in a backward pass that makes no graph, for all parameters.
// Besides, rows that are made by themselves may have other bits than those of the whole product,
// where the library adds up in another order. What is faster differs from run to run, and bits must
// not: of each shape both are made once and compared, and only where they are the same are products
// of that shape made in parts.
//
// If it becomes something else all the same, that is an error: GradientBucket::settle_made,
// DdpParts::issue_in_parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <memory>

#include "named/part_maker.h"

namespace horon::torch_backend {

// Whose gradients they are.
class GradientProducts {
 public:
  virtual ~GradientProducts() = default;
  // Whether the gradient of a parameter may be reduced while it is made, if it is made now.
  virtual bool may_make(std::size_t parameter) const = 0;
  // Calls `make` until all of `gradient` is made, which has the parameter's shape.
  virtual void make(std::size_t parameter, const at::Tensor& gradient, PartMaker::Make make) = 0;
};

// What an accumulator has without somebody else's interest in the gradient.
struct AccumulatorUse {
  std::size_t n_holders = 1;  // but for the edges that lead to it
  std::size_t n_pre_hooks = 0;
  std::size_t n_post_hooks = 1;
};

// From now on products that make the gradient of the parameter with this accumulator go to its
// owner, until forget_products(). The accumulator lives until then. Thread safety: all.
void watch_products(torch::autograd::Node* accumulator, std::weak_ptr<GradientProducts> owner,
                    std::size_t parameter, AccumulatorUse use = {});
void forget_products(torch::autograd::Node* accumulator);

}  // namespace horon::torch_backend
