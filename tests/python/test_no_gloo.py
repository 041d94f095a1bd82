"""Within a host everything goes through shared memory: the same with a Gloo that raises when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import BACKEND, TORCH_VERSION, RankError, gloo_lacks, run_ranks, store
from operations import KINDS, start
from torch.nn.parallel import DistributedDataParallel

FORBIDDEN = {"HORON_TEST_FORBID_GLOO": "1"}
COUNTS = (0, 1, 1000, 300000)


@pytest.fixture(autouse=True)
def not_gloo_itself() -> None:
    """Nothing to see when the tests are validated."""
    gloo_lacks("is what is forbidden")


def _every_kind(rank: int, world_size: int) -> None:
    for kind in KINDS:
        for count in COUNTS:
            work, outputs, values = start(kind, rank, world_size, count)
            work.wait()
            for output, value in zip(outputs, values, strict=False):
                assert (output == value).all(), f"{kind} n={count}"


def _synchronous(rank: int, world_size: int) -> None:
    n, total = world_size, float(sum(range(world_size)))
    for count in COUNTS:
        mine = torch.full((count,), float(rank))
        dist.all_reduce(mine)
        assert (mine == total).all()
        dist.broadcast(mine, n - 1)
        gathered = torch.zeros(n * count)
        dist.all_gather_into_tensor(gathered, mine)
        dist.reduce_scatter_tensor(mine, gathered)
        assert (mine == n * total).all()
        received = torch.zeros(n * count)
        dist.all_to_all_single(received, gathered)
        assert (received == total).all()
    if TORCH_VERSION >= (2, 15):  # before, torch.distributed has it for Gloo alone
        dist.monitored_barrier()
    dist.barrier()


def _messages(rank: int, world_size: int) -> None:
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for count in COUNTS:
        mine, other = torch.full((count,), float(rank)), torch.zeros(count)
        work = dist.isend(mine, right, tag=3)
        assert dist.recv(other, left, tag=3) == left
        assert work is not None
        work.wait()
        assert (other == left).all()
        operations = [dist.P2POp(dist.irecv, other, left), dist.P2POp(dist.isend, mine, right)]
        for each in dist.batch_isend_irecv(operations):
            each.wait()
        if rank == 0:
            for _ in range(world_size - 1):
                source = dist.recv(other)
                assert (other == source).all()
        else:
            dist.send(mine, 0)
        dist.barrier()


def _objects(rank: int, world_size: int) -> None:
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(world_size)]
    dist.gather_object(rank, gathered if rank == 0 else None)
    objects = ["x" * 10000, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, 1)
    assert objects == ["x" * 10000, 1]
    one: list[Any] = [None]
    dist.scatter_object_list(one, list(range(world_size)) if rank == 0 else None)
    assert one == [rank]
    if rank == 0:
        dist.send_object_list(["a", 2], 1)
    elif rank == 1:
        both: list[Any] = [None, None]
        dist.recv_object_list(both, 0)
        assert both == ["a", 2]


def _coalesced(rank: int, world_size: int) -> None:
    total = float(sum(range(world_size)))
    for count in COUNTS:
        tensors = [torch.full((count + i,), float(rank)) for i in range(3)]
        dist.all_reduce_coalesced(tensors)
        assert all((tensor == total).all() for tensor in tensors)
        for async_ops in (False, True):
            tensors = [torch.full((count + i,), float(rank)) for i in range(3)]
            with dist._coalescing_manager(async_ops=async_ops) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            if async_ops:
                manager.wait()
            assert all((tensor == total).all() for tensor in tensors)
            outputs = [torch.zeros(world_size * (count + i)) for i in range(3)]
            with dist._coalescing_manager(async_ops=async_ops) as manager:
                for output, tensor in zip(outputs, tensors, strict=True):
                    dist.all_gather_into_tensor(output, tensor)
            if async_ops:
                manager.wait()
            assert all((output == total).all() for output in outputs)


def _groups(rank: int, world_size: int) -> None:
    for members in ([0], [0, 1], [1, 2], [2, 0], [0, 1, 2]):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.full((1000,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(members)).all()
            dist.destroy_process_group(group)
    world = dist.group.WORLD
    assert world is not None
    parent: Any = world._get_backend(torch.device("cpu"))
    color = [0, 2] if rank != 1 else [1]
    child = parent.split(dist.PrefixStore("split", store()), color, parent.options)
    tensor = torch.full((1000,), float(rank))
    work = child.allreduce([tensor], dist.AllreduceOptions())
    if work is not None:
        work.wait()
    assert (tensor == sum(color)).all()
    child.shutdown()


def _clients(rank: int, world_size: int) -> None:
    tensor = functional.all_reduce(torch.full((5000,), float(rank)), "sum", dist.group.WORLD)
    assert (tensor == sum(range(world_size))).all()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)))
    model(torch.full((4, 300), float(rank))).sum().backward()
    dist.barrier()


@pytest.mark.parametrize("fn", [_every_kind, _synchronous, _messages, _objects, _coalesced, _groups, _clients])
def test_nothing_within_a_host_makes_gloo(fn: Callable[[int, int], None]) -> None:
    run_ranks(fn, 3, env=FORBIDDEN)


def _on_two_hosts(rank: int, world_size: int, path: str) -> None:
    os.environ["HORON_HOST_ID"] = str(rank)
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )


def test_between_hosts_it_would_have_been_noticed(tmp_path: Any) -> None:
    with pytest.raises(RankError, match="a Gloo group was asked for"):
        run_ranks(_on_two_hosts, 2, str(tmp_path / "store"), init=False, env={**FORBIDDEN, "HORON_CARRIER": "gloo"})
