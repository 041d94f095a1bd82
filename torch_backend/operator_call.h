// torch.ops.horon.all_reduce_ for ordinary calls, past PyTorch's matching of schemas, boxing and
// dispatch, which would cost more than the operation.
#pragma once

namespace horon::torch_backend {

// From now on `torch.ops.horon.all_reduce_(tensor, op, group_name)` goes straight to the group
// where nobody could tell the difference: a plain CPU tensor that needs no gradient, no keyword
// arguments, and no mode, tracer, transform or profiler that wants to see the call. Everything
// else, errors included, goes through the dispatcher as before; so does the overload,
// `torch.ops.horon.all_reduce_.default`. Requires the GIL.
void shorten_operator_calls();

}  // namespace horon::torch_backend
