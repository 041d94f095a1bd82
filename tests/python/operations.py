"""Every kind of collective behind one function, for tests that treat them alike."""

from __future__ import annotations

import torch
import torch.distributed as dist

KINDS = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
]


def outcome(work: dist.Work) -> object:
    """The error of a work, or None. (torch 2.11 can not turn errors into Python's: there a word stands for it.)"""
    try:
        return work.exception()
    except TypeError:
        return None if work.is_success() else "an error"


def start(kind: str, rank: int, n: int, count: int) -> tuple[dist.Work, list[torch.Tensor], list[float]]:
    """Issues an operation; returns its work, its outputs, and the value that fills each output afterwards."""
    mine = torch.full((count,), float(rank))
    flat = torch.full((n * count,), -1.0)
    lists = [torch.full((count,), -1.0) for _ in range(n)]
    total, all_ranks = float(sum(range(n))), [float(r) for r in range(n)]
    if kind == "all_reduce":
        return dist.all_reduce(mine, async_op=True), [mine], [total]
    if kind == "broadcast":
        return dist.broadcast(mine, n - 1, async_op=True), [mine], [n - 1.0]
    if kind == "reduce":
        return dist.reduce(mine, 0, async_op=True), [mine] if rank == 0 else [], [total]
    if kind == "all_gather":
        return dist.all_gather(lists, mine, async_op=True), lists, all_ranks
    if kind == "all_gather_into_tensor":
        return dist.all_gather_into_tensor(flat, mine, async_op=True), list(flat.split(count)), all_ranks
    if kind == "gather":
        work = dist.gather(mine, lists if rank == 0 else None, 0, async_op=True)
        return work, lists if rank == 0 else [], all_ranks
    if kind == "scatter":
        sent = [torch.full((count,), float(r)) for r in range(n)]
        return dist.scatter(mine, sent if rank == 0 else None, 0, async_op=True), [mine], [float(rank)]
    if kind == "reduce_scatter":
        output = torch.zeros(count)
        return dist.reduce_scatter(output, [mine.clone() for _ in range(n)], async_op=True), [output], [total]
    if kind == "reduce_scatter_tensor":
        output = torch.zeros(count)
        return dist.reduce_scatter_tensor(output, mine.repeat(n), async_op=True), [output], [total]
    if kind == "all_to_all":
        return dist.all_to_all(lists, [mine.clone() for _ in range(n)], async_op=True), lists, all_ranks
    if kind == "all_to_all_single":
        return dist.all_to_all_single(flat, mine.repeat(n), async_op=True), list(flat.split(count)), all_ranks
    assert kind == "barrier"
    return dist.barrier(async_op=True), [], []
