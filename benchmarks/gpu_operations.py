"""All-reduces of a workload's tensors: direct, coalesced, bucketed, named, through DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu_ranks
import gpu_timing
import torch
import torch.distributed as dist
from gpu_timing import Cell, Contender
from gpu_workloads import WORKLOADS, Workload, buckets_of

kSmallestForBuckets = 2  # tensors


def measure(rank: int, n_ranks: int, rounds: int, name: str) -> list[Cell]:
    """Measures the workload of that name. Runs on every rank; rank 0's result counts."""
    import horon.torch as hvd

    hvd.init()
    workload = next(one for one in WORKLOADS if one.name == name)
    contenders = _contenders(workload, gpu_ranks.new_groups(), hvd)
    cells = gpu_timing.cells(workload.name, contenders, gpu_timing.take_turns(contenders, rounds))
    hvd.shutdown()
    return cells


def _contenders(workload: Workload, groups: dict[str, dist.ProcessGroup], hvd: Any) -> list[Contender]:
    contenders: list[Contender] = []
    for backend, group in groups.items():
        ways = {"direct": direct, "synchronous": _synchronous, "coalesced": coalesced, "one call": _one_call}
        for way, call in ways.items():
            tensors = [torch.zeros(shape, device="cuda") for shape in workload.shapes]
            contenders.append(on_tensors(f"{backend} {way}", workload, tensors, group, call))
        if len(workload.shapes) >= kSmallestForBuckets:
            contenders.append(_bucketed(f"{backend} bucketed", workload, group))
    contenders += _named(workload, hvd)
    contenders += _optimizers(workload, hvd)
    return contenders


def _fill(tensors: Sequence[torch.Tensor]) -> None:
    torch._foreach_zero_(tensors)
    torch._foreach_add_(tensors, float(dist.get_rank() + 1))


def _check(name: str, tensors: Sequence[torch.Tensor], expected: float) -> None:
    for tensor in tensors:
        if not bool((tensor == expected).all()):
            raise AssertionError(f"{name}: found {tensor.flatten()[0].item()}, not {expected}")


def _total() -> float:
    n = dist.get_world_size()
    return n * (n + 1) / 2


def on_tensors(
    name: str,
    workload: Workload,
    tensors: list[torch.Tensor],
    group: dist.ProcessGroup,
    call: Callable[[list[torch.Tensor], dist.ProcessGroup], None],
) -> Contender:
    return Contender(
        name,
        run=lambda: call(tensors, group),
        prepare=lambda: _fill(tensors),
        check=lambda: _check(name, tensors, _total()),
        n_bytes=workload.n_bytes,
    )


def direct(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def _synchronous(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def coalesced(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()


def _one_call(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    options = dist.distributed_c10d.AllreduceCoalescedOptions()
    group.allreduce_coalesced(tensors, options).wait()


def _bucketed(name: str, workload: Workload, group: dist.ProcessGroup) -> Contender:
    """As DDP does it: copied into buckets of 25 MiB, each reduced as soon as it is full, and copied back."""
    tensors = [torch.zeros(shape, device="cuda") for shape in workload.shapes]
    parts = []
    for indices in buckets_of(workload.shapes):
        members = [tensors[i] for i in indices]
        flat = torch.zeros(sum(tensor.numel() for tensor in members), device="cuda")
        views = [
            view.view_as(tensor) for view, tensor in zip(flat.split([t.numel() for t in members]), members, strict=True)
        ]
        parts.append((flat, views, members))

    def run() -> None:
        works = []
        for flat, views, members in parts:
            torch._foreach_copy_(views, members)
            works.append(dist.all_reduce(flat, group=group, async_op=True))
        for work, (_, views, members) in zip(works, parts, strict=True):
            work.wait()
            torch._foreach_copy_(members, views)

    return Contender(
        name, run, lambda: _fill(tensors), lambda: _check(name, tensors, _total()), n_bytes=workload.n_bytes
    )


def _named(workload: Workload, hvd: Any) -> list[Contender]:
    tensors = [torch.zeros(shape, device="cuda") for shape in workload.shapes]
    names = [f"{workload.name}.{i}" for i in range(len(tensors))]

    def one_by_one() -> None:
        pairs = zip(tensors, names, strict=True)
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=name) for tensor, name in pairs]
        for handle in handles:
            hvd.synchronize(handle)

    def grouped() -> None:
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name=f"{workload.name}.group"))

    return [
        Contender(
            name,
            run,
            prepare=lambda: _fill(tensors),
            check=lambda name=name: _check(name, tensors, _total()),  # type: ignore[misc]
            n_bytes=workload.n_bytes,
        )
        for name, run in (("horon named", one_by_one), ("horon named, one group", grouped))
    ]


def _optimizers(workload: Workload, hvd: Any) -> list[Contender]:
    """The gradients arrive as they do in training, from autograd; what that costs alone is a contender of its own.

    zero_grad() is timed, too: where gradients have been packed, their own memory is free by then, and its time is part
    of what packing took.
    """
    grads = [torch.ones(shape, device="cuda") for shape in workload.shapes]
    contenders = []
    for name in ("accumulation alone", "horon DistributedOptimizer"):
        parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
        distributed = name.startswith("horon")
        if distributed:
            named = [(f"{workload.name}.p{i}", parameter) for i, parameter in enumerate(parameters)]
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)

        def run(parameters: Any = parameters, optimizer: Any = optimizer, distributed: bool = distributed) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(parameters, grads)
            if distributed:
                optimizer.synchronize()

        def check(parameters: Any = parameters, name: str = name) -> None:
            _check(name, [parameter.grad for parameter in parameters], 1.0)

        contenders.append(Contender(name, run, check=check, n_bytes=workload.n_bytes))
    return contenders
