"""broadcast of one tensor."""

from __future__ import annotations

from typing import Any

import torch

from horon.common._context import default_context
from horon.common._reduce_ops import Average
from horon.common.process_sets import ProcessSet, global_process_set
from horon.torch._allreduce import allreduce
from horon.torch._completion import synchronize
from horon.torch._issue import check, expect, id_of, issue_as, needs_grad


def _issue(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    check((tensor,))
    number = id_of(process_set)
    engine = default_context.engine
    handle = issue_as("broadcast", name, number, lambda name: engine.broadcast(tensor, output, root_rank, name, number))
    return expect(handle, lambda _: output, (tensor, output))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts to send a tensor from one rank to all; `tensor` is not changed.

    Args:
        tensor: Any shape, contiguous; shape and dtype the same on all ranks. Only the root's values count.
        root_rank: A global rank, also within a process set.
        name: As :func:`allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle; synchronize() returns a new tensor.

    Raises:
        ValueError: As :func:`allreduce_async`; or the root is not in the process set.

    Source: Horovod 0.28.1 ``broadcast_async``.
    """
    return _issue(tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like :func:`broadcast_async`, into `tensor` itself. Source: Horovod 0.28.1 ``broadcast_async_``."""
    return _issue(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Sends a tensor from one rank to all, into `tensor` itself, and blocks. Returns the tensor.

    Arguments, errors: as :func:`broadcast_async`; HorovodInternalError when ranks disagree about shape, dtype or root.
    Source: Horovod 0.28.1 ``broadcast_``.
    """
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Sends a tensor from one rank to all, and blocks.

    Autograd goes through it: the root's gradient is the average over the ranks, the others' is zero.

    Arguments, errors: as :func:`broadcast_`.

    Returns:
        A new tensor.

    Source: Horovod 0.28.1 ``broadcast``.
    """
    if needs_grad((tensor,)):
        return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return]
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = allreduce(grads[0].contiguous(), op=Average, process_set=ctx.process_set)
        if default_context.topology.rank != ctx.root_rank:
            grad.zero_()
        return grad, None, None, None
