"""TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend; everything must still work through the wrapper."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import TORCH_VERSION, assert_clean_exits, expect_error, gloo_lacks, on_gloo, run_fresh_processes
from operations import KINDS, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def _operations(rank: int, world_size: int) -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    group = dist.new_group()
    for _ in range(3):
        for kind in KINDS:
            work, outputs, values = start(kind, rank, world_size, 100)
            work.wait()
            for output, value in zip(outputs, values, strict=False):
                assert (output == value).all(), kind
    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert (tensor == sum(range(world_size))).all()
    (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(world_size))
    dist.destroy_process_group()


def test_every_operation() -> None:
    assert_clean_exits(run_fresh_processes(_operations, 2, env=DETAIL, executed=True))


def _ddp(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    model(torch.ones(3, 4) * (rank + 1)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 4), 4.5))
    dist.destroy_process_group()


def test_ddp() -> None:
    gloo_lacks("DDP's logger takes the wrapper for a ProcessGroupGloo and crashes")
    assert_clean_exits(run_fresh_processes(_ddp, 2, env=DETAIL, executed=True))


def _context_of_backward(rank: int, world_size: int) -> None:
    contexts = []

    def copy_context(original: Callable[[], contextvars.Context] = contextvars.copy_context) -> contextvars.Context:
        context = original()
        contexts.append(weakref.ref(context))
        return context

    contextvars.copy_context = copy_context  # type: ignore[assignment]
    model = DDP(nn.Linear(4, 2))
    model(torch.ones(3, 4)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    assert contexts or TORCH_VERSION < (2, 13)
    assert all(context() is not None for context in contexts)


def test_gloo_never_has_the_last_share_of_a_context() -> None:
    """Else its thread may want the GIL while the interpreter ends, which aborts the process: one run in thirty."""
    gloo_lacks("aborts, in rare cases")
    assert_clean_exits(run_fresh_processes(_context_of_backward, 2, env=DETAIL, executed=True))


def _mismatch(rank: int, world_size: int) -> None:
    expect_error(lambda: dist.all_reduce(torch.ones(3 + rank)), within_s=20)
    expect_error(lambda: dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(3)), within_s=20)
    if not on_gloo():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert (tensor == world_size).all()
    dist.destroy_process_group()


def test_mismatch_is_an_error() -> None:
    assert_clean_exits(run_fresh_processes(_mismatch, 2, env=DETAIL, executed=True, group_timeout_s=10))
