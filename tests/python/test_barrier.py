"""barrier and monitored_barrier."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import expect_error, run_ranks, store


def _barrier_holds_back(rank: int, world_size: int) -> None:
    for turn in range(world_size):
        # The rank whose turn it is arrives late and leaves a mark first; nobody may pass before the mark is there.
        if rank == turn:
            time.sleep(0.05)
            store().add(f"mark{turn}", 1)
        dist.barrier()
        assert store().add(f"mark{turn}", 0) == 1, f"rank {rank} passed before rank {turn} arrived"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_barrier_waits_for_the_last_rank(world_size: int) -> None:
    run_ranks(_barrier_holds_back, world_size)


def _async_barrier(rank: int, world_size: int) -> None:
    if rank == 0:
        work = dist.barrier(async_op=True)
        time.sleep(0.1)
        assert not work.is_completed(), "the barrier completed without the other ranks"
        store().set("seen", "1")
    else:
        store().wait(["seen"])
        work = dist.barrier(async_op=True)
    work.wait()
    assert work.is_completed()
    for _ in range(200):
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_async_barrier_completes_only_with_all(world_size: int) -> None:
    run_ranks(_async_barrier, world_size)


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _monitored(rank: int, world_size: int) -> None:
    for _ in range(3):
        _group().monitored_barrier(timedelta(seconds=20))
    value = torch.tensor([rank])
    dist.all_reduce(value)
    assert value.item() == sum(range(world_size))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_monitored_barrier_passes(world_size: int) -> None:
    run_ranks(_monitored, world_size)


def _monitored_missing(rank: int, world_size: int) -> None:
    if rank == 1:
        store().wait(["failed"])
        return
    words = ["Rank 1 failed to pass monitoredBarrier"] if rank == 0 else []
    expect_error(lambda: _group().monitored_barrier(timedelta(seconds=1 if rank == 0 else 10)), *words, within_s=15)
    if rank == 0:
        store().set("failed", "1")


@pytest.mark.parametrize("world_size", [2, 3])
def test_monitored_barrier_names_the_missing_rank(world_size: int) -> None:
    run_ranks(_monitored_missing, world_size)


def _monitored_missing_all(rank: int, world_size: int) -> None:
    if rank != 0:
        store().wait(["failed"])
        return
    expect_error(lambda: _group().monitored_barrier(timedelta(seconds=1), wait_all_ranks=True), "1, 2", within_s=15)
    store().set("failed", "1")


def test_monitored_barrier_names_all_missing_ranks() -> None:
    run_ranks(_monitored_missing_all, 3)
