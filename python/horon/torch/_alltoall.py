"""alltoall: every rank sends rows to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horon.common._context import default_context
from horon.common.process_sets import ProcessSet, global_process_set
from horon.torch._completion import synchronize
from horon.torch._issue import check, expect, id_of, issue_as, needs_grad

Splits = torch.Tensor | Sequence[int] | None


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts to send rows of the first dimension to the ranks, in rank order.

    Args:
        tensor: At least one dimension, contiguous. All dimensions but the first are the same on all ranks.
        splits: How many rows go to each rank; one-dimensional integers. Rows that are left over go to none. None: the
            same number to each.
        name: As :func:`allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle; synchronize() returns the received rows and, in a tensor of `splits`' dtype and device (int32 on the
        CPU unless it is a tensor), how many of them came from each rank.

    Raises:
        ValueError: As :func:`allreduce_async`; or the splits do not fit the tensor or the number of ranks.

    Source: Horovod 0.28.1 ``alltoall_async``.
    """
    check((tensor,))
    number = id_of(process_set)
    numbers: list[int] | None = None
    dtype, device = torch.int32, torch.device("cpu")
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.dtype.is_floating_point:
            raise ValueError("horon: alltoall: splits must be a one-dimensional tensor of integers.")
        numbers, dtype, device = splits.tolist(), splits.dtype, splits.device
    elif splits is not None:
        numbers = [int(split) for split in splits]
    engine = default_context.engine
    handle = issue_as("alltoall", name, number, lambda name: engine.alltoall(tensor, numbers, name, number))
    return expect(handle, lambda outputs: (outputs[0], outputs[1].to(device, dtype)), tensor)


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows of the first dimension to the ranks, and blocks. Autograd goes through it: gradients travel back.

    Arguments, errors: as :func:`alltoall_async`.

    Returns:
        The received rows, in rank order; with `splits`, also how many of them came from each rank.

    Source: Horovod 0.28.1 ``alltoall``.
    """
    if needs_grad((tensor,)):
        output, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.n_rows = received, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, _ = alltoall(grads[0].contiguous(), splits=ctx.received, process_set=ctx.process_set)
        n_unsent = ctx.n_rows - grad.shape[0]
        if n_unsent > 0:
            grad = torch.cat([grad, grad.new_zeros(n_unsent, *grad.shape[1:])])
        return grad, None, None, None
