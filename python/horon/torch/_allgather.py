"""allgather, of one tensor and of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horon.common._context import default_context
from horon.common._reduce_ops import Average
from horon.common.process_sets import ProcessSet, global_process_set
from horon.torch._completion import synchronize
from horon.torch._issue import check, expect, first, group_names, id_of, issue_as, needs_grad


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts to put the ranks' tensors one after another along the first dimension.

    Args:
        tensor: At least one dimension, contiguous. All dimensions but the first are the same on all ranks.
        name: As :func:`allreduce_async`.
        process_set: The ranks that take part; tensors come in their order.

    Returns:
        A handle; synchronize() returns a new tensor.

    Raises:
        ValueError: As :func:`allreduce_async`.

    Source: Horovod 0.28.1 ``allgather_async``.
    """
    check((tensor,))
    number = id_of(process_set)
    engine = default_context.engine
    handle = issue_as("allgather", name, number, lambda name: engine.allgather([tensor], [name], number))
    return expect(handle, first, tensor)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Puts the ranks' tensors one after another along the first dimension, and blocks.

    Autograd goes through it: the gradient of this rank's rows is averaged over the ranks.

    Arguments, errors: as :func:`allgather_async`; HorovodInternalError when ranks disagree about dtype or the other
    dimensions. Source: Horovod 0.28.1 ``allgather``.
    """
    if needs_grad((tensor,)):
        return _Allgather.apply(tensor, name, process_set)  # type: ignore[no-any-return]
    return synchronize(allgather_async(tensor, name, process_set))  # type: ignore[no-any-return]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        gathered = synchronize(allgather_async(tensor, name, process_set))
        ctx.n_rows, ctx.process_set = tensor.shape[0], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _own_rows(list(grads), [ctx.n_rows], ctx.process_set)[0], None, None


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like :func:`allgather_async` for several tensors together: one handle for a list of new tensors.

    Source: Horovod 0.28.1 ``grouped_allgather_async``.
    """
    check(tensors)
    number = id_of(process_set)
    engine = default_context.engine
    handle = issue_as(
        "grouped_allgather",
        name,
        number,
        lambda base: engine.allgather(list(tensors), group_names(base, len(tensors)), number),
    )
    return expect(handle, tuple, tensors)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Like :func:`allgather` for several tensors together. Source: Horovod 0.28.1 ``grouped_allgather``."""
    return _GroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-any-return]


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        gathered = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.n_rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *_own_rows(list(grads), ctx.n_rows, ctx.process_set))


def _own_rows(grads: list[torch.Tensor], n_rows: list[int], process_set: ProcessSet) -> list[torch.Tensor]:
    """Averages gradients of gathered tensors, and cuts out this rank's rows of each."""
    number = id_of(process_set)
    sent = [grad.contiguous() for grad in grads]
    outputs = [torch.empty_like(grad) for grad in sent]
    names = group_names(default_context.new_name("grouped_allreduce", number), len(sent))
    engine = default_context.engine
    reduction = engine.allreduce(sent, outputs, names, Average, 1.0, 1.0, number)
    everyones_rows = allgather(torch.tensor([n_rows], dtype=torch.int64), process_set=process_set)
    engine.wait(reduction)
    starts = everyones_rows[: process_set.rank()].sum(dim=0).tolist()
    return [output.narrow(0, start, n) for output, start, n in zip(outputs, starts, n_rows, strict=True)]
