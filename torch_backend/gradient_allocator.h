// Gradients that autograd makes right in the arena.
//
// Note [Gradients in the arena]
// With zero_grad(set_to_none=True), torch's default, a parameter's .grad is whatever tensor the
// backward pass made for it: autograd takes it as it is, without a copy. So that it can be reduced
// in place, it has to be made in the arena to begin with. torch's CPU allocator is therefore
// wrapped once, when the first DistributedOptimizer asks for it (or horon.ddp_in_arena, Note
// [Gradients in their places]): what autograd allocates during a backward
// pass, with exactly the size of a gradient that is waited for, comes from the arena; everything
// else, and all of it where the arena is full or off, comes from the allocator that was there
// before.
#pragma once

#include <cstddef>
#include <vector>

namespace horon::torch_backend {

// From now on gradients of these sizes (bytes, each of at least 4 KiB) are made in the arena, as
// often as they were expected. Thread safety: both, from any thread.
void expect_gradients(const std::vector<std::size_t>& bytes);
void forget_gradients(const std::vector<std::size_t>& bytes);

// Wraps torch's CPU allocator, unless it is wrapped already.
void wrap_cpu_allocator();

}  // namespace horon::torch_backend
