"""reducescatter, of one tensor and of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horon.common._context import default_context
from horon.common._reduce_ops import Average, Sum
from horon.common.process_sets import ProcessSet, global_process_set
from horon.torch._allgather import allgather, grouped_allgather
from horon.torch._completion import synchronize
from horon.torch._issue import check, expect, first, group_names, id_of, issue_as, needs_grad
from horon.torch.compression import Compression, Compressor


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts to reduce a tensor over the ranks and to give each rank some rows of the result.

    Args:
        tensor: At least one dimension, contiguous; shape and dtype the same on all ranks.
        name: As :func:`allreduce_async`.
        op: Average or Sum.
        process_set: The ranks that take part. Rank i gets the i-th run of rows; when they can not be divided evenly,
            the first ranks get one more.
        prescale_factor, postscale_factor: As :func:`allreduce_async`.

    Returns:
        A handle; synchronize() returns a new tensor.

    Raises:
        ValueError: As :func:`allreduce_async`; or another op.

    Source: Horovod 0.28.1 ``reducescatter_async``.
    """
    check((tensor,))
    number = id_of(process_set)
    engine = default_context.engine
    handle = issue_as(
        "reducescatter",
        name,
        number,
        lambda name: engine.reducescatter([tensor], [name], op, prescale_factor, postscale_factor, number),
    )
    return expect(handle, first, tensor)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over the ranks, gives each rank some rows of the result, and blocks.

    Autograd goes through it: gradients are gathered (times the number of ranks for Sum, times the factors).

    Arguments, errors: as :func:`reducescatter_async`; `compression` as :func:`allreduce`.
    Source: Horovod 0.28.1 ``reducescatter``.
    """
    sent, ctx = compression.compress(tensor)
    if needs_grad((sent,)):
        reduced = _Reducescatter.apply(sent, name, op, process_set, prescale_factor, postscale_factor)
    else:
        reduced = synchronize(reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor))
    return compression.decompress(reduced, ctx)


def _gradient_factor(op: int, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    return (process_set.size() or 1 if op == Sum else 1) * prescale * postscale


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Any:
        ctx.factor, ctx.process_set = _gradient_factor(op, process_set, prescale, postscale), process_set
        return synchronize(reducescatter_async(tensor, name, op, process_set, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = allgather((grads[0] * ctx.factor).contiguous(), process_set=ctx.process_set)
        return grad, None, None, None, None, None


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Like :func:`reducescatter_async` for several tensors together: one handle for several new tensors.

    Source: Horovod 0.28.1 ``grouped_reducescatter_async``.
    """
    check(tensors)
    number = id_of(process_set)
    engine = default_context.engine

    def issue(base: str) -> int:
        names = group_names(base, len(tensors))
        return engine.reducescatter(list(tensors), names, op, prescale_factor, postscale_factor, number)

    handle = issue_as("grouped_reducescatter", name, number, issue)
    return expect(handle, tuple, tensors)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Like :func:`reducescatter` for several tensors together. Source: Horovod 0.28.1 ``grouped_reducescatter``."""
    sent = [compression.compress(tensor) for tensor in tensors]
    arguments = name, op, process_set, prescale_factor, postscale_factor
    reduced = _GroupedReducescatter.apply(*arguments, *(tensor for tensor, _ in sent))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, sent, strict=True)]


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.factor, ctx.process_set = _gradient_factor(op, process_set, prescale, postscale), process_set
        return synchronize(grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gathered = grouped_allgather([(grad * ctx.factor).contiguous() for grad in grads], process_set=ctx.process_set)
        return (None, None, None, None, None, *gathered)
