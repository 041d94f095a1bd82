// DistributedDataParallel with its buckets in the arena.
#pragma once

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <vector>

#include "compat.h"
#include "ddp_parts.h"
#include "own_gradients.h"

namespace horon::torch_backend {

// Note [DDP in the arena]
// DDP allocates its buckets itself, and again before the second forward pass. So the hook looks
// where a bucket is each time that it is called, moves its storage into the arena when it is
// outside, and averages it there. The gradients that DDP shows as views of the bucket
// (gradient_as_bucket_view=True) follow, because they share the storage. Only memory that was
// handed out as a bare address, as NumPy does, would not: in that mode the old memory is kept as
// long as the hook. Gradients are made in their places (Note [Gradients in their places]), and
// large ones averaged meanwhile (Note [DDP's gradients in parts] in ddp_parts.h).
//
// Registers the hook. Requires: no other hook is registered, as Reducer checks; the reducer has
// gradient_as_bucket_view=True unless gradients are copied. Unless they are, places have to be lent
// in a forward pass whose backward pass DDP will reduce (set_lending() of the parts), and the hook
// ends that.
// `own`: with kOwn; watches since before the reducer was made.
std::shared_ptr<DdpParts> register_ddp_arena_hook(
    c10d::Reducer& reducer, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    DdpGradients gradients, std::shared_ptr<OwnGradients> own);

}  // namespace horon::torch_backend
