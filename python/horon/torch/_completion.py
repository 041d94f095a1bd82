"""The ends of operations: poll, synchronize, join, barrier."""

from __future__ import annotations

from typing import Any

import torch

from horon.common._context import default_context
from horon.common.exceptions import HorovodInternalError
from horon.common.process_sets import ProcessSet, global_process_set
from horon.torch._issue import id_of

_SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. This rank has called hvd.shutdown() "
    "while the operation was in flight."
)
"""Begins as Horovod's, which scripts look for."""


def poll(handle: int) -> bool:
    """Whether an operation is over, so that synchronize() does not block. Does not block itself.

    Of CUDA tensors: whether the GPU has come to the end of it.

    Raises:
        ValueError: No operation has this handle, or synchronize() was called for it.
        TypeError: It is no handle.

    Source: Horovod 0.28.1 ``poll``.
    """
    engine = default_context.engine
    try:
        return engine.poll(handle)
    except TypeError:
        if isinstance(handle, int):  # a negative one, or one of more than 64 bits
            raise ValueError(f"Handle {handle} was not created or has been cleared.") from None
        raise _no_handle("poll", handle) from None


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result: a tensor, or a tuple for grouped operations and alltoall.

    Of CUDA tensors it waits only until the ranks have agreed and the GPU was told; then it makes the current stream
    wait for the result, as operations of PyTorch do.

    Returns None when synchronize() was called for this handle before, as in Horovod. Ctrl-C works while it waits.

    Raises:
        HorovodInternalError: Ranks disagreed about the operation, a rank was lost, or horon was shut down.
        TypeError: It is no handle (Horovod returns None).

    Source: Horovod 0.28.1 ``synchronize``.
    """
    context = default_context
    try:
        pending = context.pending.get(handle)
        if pending is None:
            return context.take(handle)
    except OverflowError:
        return None  # no handle is negative, or has more than 64 bits
    except TypeError:
        if isinstance(handle, int):
            raise
        raise _no_handle("synchronize", handle) from None
    if not context.is_initialized:
        context.pending.pop(handle, None)
        raise HorovodInternalError(_SHUT_DOWN)
    try:
        outputs = context.engine.wait(handle)
    except KeyboardInterrupt:
        raise  # It goes on, and can be waited for again.
    except BaseException:
        context.pending.pop(handle, None)
        raise
    context.pending.pop(handle, None)
    return pending.result(outputs)


def _no_handle(function: str, given: Any) -> TypeError:
    hint = " Call it: it is what sparse_allreduce_async() returned." if callable(given) else ""
    return TypeError(
        f"horon: hvd.{function}() expects a handle, the int that an operation whose name ends in _async or _async_ has "
        f"returned, got {given!r:.100}.{hint}"
    )


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and blocks until all ranks have said so.

    Meanwhile it takes part in the others' operations with zeros; Average still divides by the number of all ranks.

    Args:
        device: The GPU for the zeros, where this rank has not used one before. -1: the current one.

    Returns:
        The rank that joined last.

    Source: Horovod 0.28.1 ``join``.
    """
    engine = default_context.engine
    last = int(engine.wait(engine.join(_device_for_zeros(device)))[0].item())
    default_context.joined()
    return last


def _device_for_zeros(device: int) -> int:
    """CUDA is not initialised for it: a rank that has used none gets its GPU by its place on the node."""
    if device >= 0:
        return device
    has_context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if has_context else default_context.topology.local_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until all ranks of the process set have called it. Operations in flight may go on.

    Raises:
        ValueError: This rank is not in the process set.

    Source: Horovod 0.28.1 ``barrier``.
    """
    engine = default_context.engine
    engine.wait(engine.barrier(id_of(process_set)))
