// Keeps Gloo's threads from needing the GIL while the interpreter ends.
//
// Note [Kept contexts]
// backward() puts a copy of Python's context into the state of its thread (torch 2.13 and newer),
// and takes it away at its end. A work of Gloo has a copy of that state, so a collective that was
// called during backward() may leave Gloo's thread with the last share of the context, and dropping
// that takes the GIL. If the interpreter ends just then, Python ends Gloo's thread in the middle of
// a destructor: "terminate called without an active exception". Two cases are ours: Gloo carries
// the bytes between hosts, and PyTorch checks collectives with a Gloo group of its own when
// TORCH_DISTRIBUTED_DEBUG is DETAIL (one DDP run in thirty, on a busy machine). With a share here,
// Gloo's is never the last.
#pragma once

namespace horon::torch_backend {

// Takes a share of the Python context in this thread's state, if there is one; gives it back after
// the contexts of several later backward passes have come, or never.
void keep_python_context();

}  // namespace horon::torch_backend
