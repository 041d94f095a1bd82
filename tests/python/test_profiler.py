"""The profiler shows horon's operations under their names, and nothing is shown of what ran without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, run_ranks
from torch.profiler import ProfilerActivity, profile


def _names(recorded: profile) -> list[str]:
    return [event.name for event in recorded.events() if event.name.startswith(f"{BACKEND}:")]


def _profiled(rank: int, world_size: int, async_op: bool) -> None:
    def reduce() -> None:
        work = dist.all_reduce(torch.ones(3), async_op=async_op)
        if work is not None:
            work.wait()

    reduce()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(3):
            reduce()
        dist.broadcast(torch.ones(2), 0)
    reduce()
    names = _names(recorded)
    assert names.count(f"{BACKEND}:all_reduce") == 3, names
    assert names.count(f"{BACKEND}:broadcast") == 1, names


@pytest.mark.parametrize("async_op", [False, True])
def test_operations_have_their_names(async_op: bool) -> None:
    run_ranks(_profiled, 2, async_op)
