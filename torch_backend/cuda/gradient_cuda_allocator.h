// Gradients that autograd makes right in DistributedOptimizer's buckets on a GPU.
//
// Note [Gradients on GPUs]
// torch's caching allocator is wrapped once, when the first such bucket is laid out: what autograd
// allocates during a backward pass for a gradient whose place is known is that place (Note
// [Gradients in their places]); everything else goes to the allocator that was there before.
// - A place belongs to no stream. Who makes a gradient there waits, as the backward pass does, for
//   what the caller's stream has done: the last reduction, and the step that has read it. Within a
//   step all that is lent of a pack is for one stream; what is lent and then used on a second one
//   becomes ordinary memory, and the pack leaves it.
// - While a memory pool is in use (CUDA graphs, torch.cuda.use_mem_pool) nothing is lent: those who
//   route allocations want to have them there.
#pragma once

namespace horon::torch_backend {

// Wraps torch's CUDA allocator, unless it is wrapped already.
void wrap_cuda_allocator();

}  // namespace horon::torch_backend
