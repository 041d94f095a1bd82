"""allreduce, of one tensor and of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horon import _C
from horon.common._context import default_context
from horon.common._reduce_ops import Adasum, Average, Sum
from horon.common.process_sets import ProcessSet, global_process_set
from horon.common.util import num_rank_is_power_2
from horon.torch._allgather import allgather_async
from horon.torch._completion import synchronize
from horon.torch._issue import (
    check,
    expect,
    group_names,
    handle_average_backwards_compatibility,
    id_of,
    issue_as,
    needs_grad,
)
from horon.torch.compression import Compression, Compressor


def _check_adasum(process_set: int) -> None:
    if process_set != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if not num_rank_is_power_2(default_context.topology.size):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def _issue_one(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    will_wait: bool = False,
) -> int:
    number = process_set.process_set_id
    if number is None:
        number = id_of(process_set)
    if op == Adasum:
        _check_adasum(number)
    allreduce = default_context.allreduce
    if name is not None:
        return allreduce(tensor, output, "allreduce." + name, op, prescale_factor, postscale_factor, number, will_wait)
    return issue_as(
        "allreduce",
        None,
        number,
        lambda name: allreduce(tensor, output, name, op, prescale_factor, postscale_factor, number, will_wait),
    )


def _output_for(tensor: torch.Tensor) -> torch.Tensor:
    """Where the result goes: a large one into memory that has been used before."""
    result = _C.result_in_arena(tensor)
    return torch.empty_like(tensor, requires_grad=False) if result is None else result


def _issue_group(
    tensors: Sequence[torch.Tensor],
    outputs: list[torch.Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    check(tensors)
    number = id_of(process_set)
    if op == Adasum:
        _check_adasum(number)
    engine = default_context.engine

    def issue(base: str) -> int:
        names = group_names(base, len(tensors))
        return engine.allreduce(list(tensors), outputs, names, op, prescale_factor, postscale_factor, number)

    handle = issue_as("grouped_allreduce", name, number, issue)
    return expect(handle, lambda _: tuple(outputs), (tensors, outputs))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts to reduce a tensor over the ranks; the tensor is not changed, and must not be until it is over.

    Args:
        tensor: Any shape, contiguous; shape and dtype the same on all ranks.
        average: Deprecated: ``op=Average`` or ``op=Sum``.
        name: By which ranks find each other's call, in any order; made up if None, and then the order counts.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result. Integers are scaled in double precision and truncated.
        process_set: The ranks that take part.

    Returns:
        A handle for :func:`poll` and :func:`synchronize`, which returns a new tensor of the same shape and dtype.

    Raises:
        ValueError: `op` and `average` together, not contiguous, unsupported dtype, a name that is in flight, this
            rank is not in the process set, or not initialised.

    Source: Horovod 0.28.1 ``allreduce_async``.
    """
    if op is None or average is not None:
        op = handle_average_backwards_compatibility(op, average)
    return _issue_one(tensor, _output_for(tensor), name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`allreduce_async`, in place: synchronize() returns `tensor` itself, which holds the result.

    Tensors in the arena (:func:`horon.empty`) are reduced without copies. Source: Horovod 0.28.1 ``allreduce_async_``.
    """
    if op is None or average is not None:
        op = handle_average_backwards_compatibility(op, average)
    if name is None or op == Adasum or process_set.process_set_id is None:
        return _issue_one(tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)
    # The most frequent call of all, without another frame.
    return default_context.allreduce(
        tensor, tensor, "allreduce." + name, op, prescale_factor, postscale_factor, process_set.process_set_id, False
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over the ranks in place, and blocks. Returns the tensor.

    Arguments and errors: as :func:`allreduce_async`; besides, HorovodInternalError when ranks disagree about shape,
    dtype, op or factors (on all ranks; the next operation works). Source: Horovod 0.28.1 ``allreduce_``.
    """
    if op is None or average is not None:
        op = handle_average_backwards_compatibility(op, average)
    default_context.take(
        _issue_one(tensor, tensor, name, op, prescale_factor, postscale_factor, process_set, will_wait=True)
    )
    return tensor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over the ranks, and blocks. Autograd goes through it: gradients are reduced the same way.

    Args:
        compression: What the tensor goes through on its way.
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: As :func:`allreduce_async`.

    Returns:
        A new tensor of the same shape and dtype; from 1 MiB on it lies in the arena (:func:`horon.empty`).

    Raises:
        ValueError: As :func:`allreduce_async`.
        HorovodInternalError: Ranks disagree about shape, dtype, op or factors; the next operation works.

    Source: Horovod 0.28.1 ``allreduce``.
    """
    op = handle_average_backwards_compatibility(op, average)
    sent, ctx = compression.compress(tensor)
    if needs_grad((sent,)):
        reduced = _Allreduce.apply(sent, name, op, prescale_factor, postscale_factor, process_set)
    else:
        reduced = _reduce(sent, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, ctx)


def _reduce(
    tensor: torch.Tensor, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> torch.Tensor:
    output = _output_for(tensor)
    default_context.take(_issue_one(tensor, output, name, op, prescale, postscale, process_set, True))
    return output


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.arguments = op, prescale, postscale, process_set
        return _reduce(tensor, name, op, prescale, postscale, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.arguments
        grad = allreduce(
            grads[0].contiguous(),
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return grad, None, None, None, None, None


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`allreduce_async` for several tensors that are reduced together, when all ranks have all of them.

    Args:
        tensors: At least one; shapes and dtypes may differ within the list.
        name: Of the group.
        average, op, prescale_factor, postscale_factor, process_set: As :func:`allreduce_async`.

    Returns:
        One handle; synchronize() returns a tuple of new tensors.

    Source: Horovod 0.28.1 ``grouped_allreduce_async``.
    """
    op = handle_average_backwards_compatibility(op, average)
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    return _issue_group(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`grouped_allreduce_async`, in place. Source: Horovod 0.28.1 ``grouped_allreduce_async_``."""
    op = handle_average_backwards_compatibility(op, average)
    return _issue_group(tensors, list(tensors), name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduces several tensors together in place, and blocks. Returns them.

    Arguments and errors: as :func:`grouped_allreduce_async` and :func:`allreduce_`.
    Source: Horovod 0.28.1 ``grouped_allreduce_``.
    """
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors together, and blocks. Autograd goes through it.

    Arguments and errors: as :func:`grouped_allreduce_async` and :func:`allreduce`.

    Returns:
        New tensors, in order.

    Source: Horovod 0.28.1 ``grouped_allreduce``.
    """
    op = handle_average_backwards_compatibility(op, average)
    sent = [compression.compress(tensor) for tensor in tensors]
    arguments = name, op, prescale_factor, postscale_factor, process_set
    reduced = _GroupedAllreduce.apply(*arguments, *(tensor for tensor, _ in sent))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, sent, strict=True)]


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.arguments = op, prescale, postscale, process_set
        return synchronize(grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.arguments
        reduced = grouped_allreduce(
            [grad.contiguous() for grad in grads],
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return (None, None, None, None, None, *reduced)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts to add up sparse tensors over the ranks, by gathering their indices and values.

    Args:
        tensor: Sparse COO; the same size on all ranks, any number of entries.
        name: As :func:`allreduce_async`.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A function that waits and returns a new sparse tensor, not coalesced.

    Raises:
        ValueError: Another op, or a dense tensor.

    Source: Horovod 0.28.1 ``sparse_allreduce_async``.
    """
    if op not in (Average, Sum):
        raise ValueError("horon: sparse_allreduce_async: op must be Average or Sum.")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"horon: sparse_allreduce_async: expected a sparse COO tensor, got {tensor.layout}.")
    tensor = tensor.detach()
    base = default_context.new_name("sparse", id_of(process_set)) if name is None else name
    indices = allgather_async(tensor._indices().t().contiguous(), name=f"{base}.indices", process_set=process_set)
    values = allgather_async(tensor._values().contiguous(), name=f"{base}.values", process_set=process_set)

    def wait() -> torch.Tensor:
        all_values = synchronize(values)
        all_indices = synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.size(), check_invariants=False)

    return wait
