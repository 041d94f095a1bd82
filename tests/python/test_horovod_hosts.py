"""The Horovod API between hosts: the control messages go over TCP, the data over Gloo.

HORON_HOST_ID makes ranks of one machine count as different hosts.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

LAYOUTS = [[0, 1], [0, 0, 1], [0, 1, 2]]
"""Host of each rank."""


@contextmanager
def _horovod(rank: int, hosts: list[int], path: str) -> Iterator[ModuleType]:
    import horon.torch as hvd

    os.environ["HORON_HOST_ID"] = f"host{hosts[rank]}"
    try:
        dist.init_process_group("horon", init_method=f"file://{path}", rank=rank, world_size=len(hosts))
        hvd.init()
        yield hvd
        hvd.shutdown()
        dist.destroy_process_group()
    finally:
        del os.environ["HORON_HOST_ID"]


def _every_kind(rank: int, size: int, hosts: list[int], path: str) -> None:
    with _horovod(rank, hosts, path) as hvd:
        for round_ in range(3):
            names = list(range(60))
            random.Random(100 * round_ + rank).shuffle(names)
            handles = {
                i: hvd.allreduce_async(torch.full((i * 37 + 1,), float(i + rank)), name=f"t{i}", op=hvd.Sum)
                for i in names
            }
            for i, handle in handles.items():
                assert (hvd.synchronize(handle) == size * i + sum(range(size))).all()
        gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
        assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
        assert hvd.broadcast(torch.full((3,), float(rank)), size - 1).tolist() == [size - 1.0] * 3
        assert hvd.reducescatter(torch.ones(size, 2), op=hvd.Sum).tolist() == [[size, size]]
        received, splits = hvd.alltoall(torch.full((size,), rank), torch.ones(size, dtype=torch.int32))
        assert received.tolist() == list(range(size)) and splits.tolist() == [1] * size
        assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0}
        assert [t.tolist() for t in hvd.grouped_allreduce([torch.ones(2), torch.ones(1)], op=hvd.Sum)] == [
            [size] * 2,
            [size],
        ]
        large = hvd.allreduce(torch.full((700_001,), float(rank)), op=hvd.Sum)
        assert (large == sum(range(size))).all()
        hvd.barrier()


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_every_kind_of_operation(hosts: list[int], tmp_path: Path) -> None:
    run_ranks(_every_kind, len(hosts), hosts, str(tmp_path / "store"), init=False)


def _sets_joins_and_errors(rank: int, size: int, hosts: list[int], path: str) -> None:
    with _horovod(rank, hosts, path) as hvd:
        # One on a single host, which shares memory; one across.
        inside, across = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        for _ in range(5):
            if rank in (0, 1):
                assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=inside).tolist() == [2.0] * 3
            if rank in (1, 2):
                total = hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum, process_set=across)
                assert total.tolist() == [3.0] * 2
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(torch.ones(2 + rank), name="bad")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [size]
        for i in range(rank):
            hvd.allreduce(torch.ones(2), name=f"step{i}")
        assert hvd.join() in range(size)
        assert hvd.remove_process_set(across)


def test_process_sets_joins_and_errors(tmp_path: Path) -> None:
    run_ranks(_sets_joins_and_errors, 3, [0, 0, 1], str(tmp_path / "store"), init=False)


def _trains(rank: int, size: int, hosts: list[int], path: str) -> None:
    with _horovod(rank, hosts, path) as hvd:
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(5):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        copies = hvd.allgather(flat[None])
        assert all(torch.equal(copies[0], copy) for copy in copies)
        assert flat.isfinite().all()


def test_distributed_optimizer(tmp_path: Path) -> None:
    run_ranks(_trains, 2, [0, 1], str(tmp_path / "store"), init=False)


def _killed(rank: int, size: int, path: str, victim: int) -> None:
    import horon.torch as hvd

    os.environ["HORON_HOST_ID"] = f"host{rank}"
    dist.init_process_group("horon", init_method=f"file://{path}", rank=rank, world_size=size)
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    for name in ("x", "y"):
        text = expect_error(lambda name=name: hvd.allreduce(torch.ones(3), name=name), within_s=10)
        assert f"rank {victim} (pid" in text and "died or can not be reached" in text, text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named(victim: int, tmp_path: Path) -> None:
    outcomes = run_fresh_processes(
        _killed,
        3,
        str(tmp_path / "store"),
        victim,
        init=False,
        timeout=60,
        env={"TORCH_INCLUDE_STACK_TRACE": "0"},
    )
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == victim else 0 for rank in range(3)])


def _wrong_interface(rank: int, size: int, path: str) -> None:
    import horon.torch as hvd

    os.environ["HORON_HOST_ID"] = f"host{rank}"
    os.environ["HORON_IFACE"] = "nowhere0" if rank == 0 else ""
    dist.init_process_group("horon", init_method=f"file://{path}", rank=rank, world_size=size)
    with pytest.raises(ValueError, match="no address on the network interfaces 'nowhere0'"):
        hvd.init()


def test_an_interface_that_does_not_exist(tmp_path: Path) -> None:
    outcomes = run_fresh_processes(_wrong_interface, 2, str(tmp_path / "store"), init=False, timeout=60)
    assert_clean_exits(outcomes)
