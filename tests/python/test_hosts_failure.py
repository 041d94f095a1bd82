"""Bad ends of groups on several hosts, some of them with several ranks: who is to blame is named everywhere.

HORON_HOST_ID makes ranks of one machine count as different hosts.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import TORCH_VERSION, assert_clean_exits, expect_error, on_gloo, run_fresh_processes
from host_groups import join

pytestmark = [pytest.mark.any_torch, pytest.mark.skipif(on_gloo(), reason="gloo: says which socket was closed")]

HOSTS = [0, 0, 1, 1]
"""Of each rank."""
DEATH_S = 10.0
"""Within which survivors must notice a death."""


def _join(rank: int, path: str, timeout_s: float = 60) -> None:
    join(rank, HOSTS, path, timeout_s)
    total = torch.ones(5)
    dist.all_reduce(total)
    assert (total == len(HOSTS)).all()


def _killed(rank: int, world_size: int, path: str, victim: int, count: int) -> None:
    _join(rank, path)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)

    def sum_up() -> None:
        dist.all_reduce(torch.ones(count))

    expect_error(sum_up, "DistBackendError", f"rank {victim} (pid ", "can not be used any more", within_s=DEATH_S)
    expect_error(sum_up, "the group has ended")
    dist.destroy_process_group()


@pytest.mark.parametrize(("victim", "count"), [(0, 5), (2, 300_000), (3, 5)])
def test_a_dead_rank_is_named_on_every_host(victim: int, count: int, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_killed, len(HOSTS), path, victim, count, init=False, timeout=60)
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == victim else 0 for rank in range(len(HOSTS))])


def _killed_in_the_middle(rank: int, world_size: int, path: str, victim: int) -> None:
    _join(rank, path)

    def sum_up() -> None:
        for step in range(1000):
            if rank == victim and step == 3:
                work = dist.all_reduce(torch.ones(2 << 20), async_op=True)
                assert not work.is_completed()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(2 << 20))

    expect_error(sum_up, "DistBackendError", "can not be used any more", within_s=3 * DEATH_S)
    dist.destroy_process_group()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_death_in_the_middle_of_a_large_operation_ends_it(victim: int, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_killed_in_the_middle, len(HOSTS), path, victim, init=False, timeout=90)
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == victim else 0 for rank in range(len(HOSTS))])


def _late(rank: int, world_size: int, path: str, absent: int) -> None:
    _join(rank, path, timeout_s=5)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if rank == absent:
        store.wait([f"done/{other}" for other in range(world_size) if other != absent], timedelta(seconds=60))
        expect_error(lambda: dist.all_reduce(torch.ones(5)), "DistBackendError", within_s=DEATH_S)
    else:
        words = ("DistBackendError", "timed out waiting 5000ms for", f"rank {absent}")
        text = expect_error(lambda: dist.all_reduce(torch.ones(5)), *words, within_s=5 + DEATH_S)
        others = [other for other in range(world_size) if other != absent]
        assert not any(f"5000ms for rank {other}" in text for other in others), text
        store.set(f"done/{rank}", "")
    dist.destroy_process_group()


@pytest.mark.parametrize("absent", [2, 3])
def test_a_rank_that_does_not_come_is_named_on_every_host(absent: int, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert_clean_exits(run_fresh_processes(_late, len(HOSTS), path, absent, init=False, timeout=90))


def _one_leaves(rank: int, world_size: int, path: str) -> None:
    _join(rank, path)
    for count in (5, 100_000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert (tensor == world_size).all()
    if rank % 2 == 1:  # At once after its last operation; the others still have what it brought.
        os._exit(0)
    expect_error(lambda: dist.all_reduce(torch.ones(5)), "DistBackendError", "rank", within_s=DEATH_S)
    dist.destroy_process_group()


def test_ranks_that_exit_after_their_last_operation(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert_clean_exits(run_fresh_processes(_one_leaves, len(HOSTS), path, init=False, timeout=60))


def _not_passing(rank: int, world_size: int, path: str, absent: list[int]) -> None:
    _join(rank, path)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if rank in absent:  # But alive.
        store.wait([f"done/{other}" for other in range(world_size) if other not in absent], timedelta(seconds=60))
        return
    timeout = timedelta(seconds=3)
    if rank > 0:
        words = ("successfully reached monitoredBarrier", "rank 0")
        expect_error(lambda: dist.monitored_barrier(timeout=timeout, wait_all_ranks=True), *words)
    else:
        names = f"Rank {absent[0]} failed" if len(absent) == 1 else f"Ranks {absent[0]}, {absent[1]} failed"
        words = (names, "to pass monitoredBarrier in 3000 ms")
        expect_error(lambda: dist.monitored_barrier(timeout=timeout, wait_all_ranks=True), *words)
    store.set(f"done/{rank}", "")


@pytest.mark.skipif(TORCH_VERSION < (2, 15), reason="torch.distributed has it for Gloo alone")
@pytest.mark.parametrize("absent", [[3], [1, 2]], ids=str)
def test_monitored_barrier_names_ranks_of_all_hosts(absent: list[int], tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_not_passing, len(HOSTS), path, absent, init=False, timeout=60)
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.stderr


def _one_destroys(rank: int, world_size: int, path: str) -> None:
    _join(rank, path)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if rank == 3:
        kept = dist.group.WORLD  # As a DistributedDataParallel would keep it.
        dist.destroy_process_group()
        store.wait([f"done/{other}" for other in range(3)], timedelta(seconds=60))
        del kept
        return
    expect_error(lambda: dist.all_reduce(torch.ones(5)), "DistBackendError", "rank 3", within_s=DEATH_S)
    store.set(f"done/{rank}", "")


def test_a_group_that_a_rank_has_destroyed_is_over_on_every_host(tmp_path: Path) -> None:
    outcomes = run_fresh_processes(_one_destroys, len(HOSTS), str(tmp_path / "store"), init=False, timeout=60)
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.stderr


def _first_comes_last(rank: int, world_size: int, path: str) -> None:
    os.environ["HORON_HOST_ID"] = "host1" if rank == 3 else "host0"
    dist.init_process_group("horon", init_method=f"file://{path}", rank=rank, world_size=world_size)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if rank == 2:
        store.wait([f"done/{other}" for other in (0, 1, 3)], timedelta(seconds=60))
        return
    time.sleep(1 if rank == 0 else 0)
    text = expect_error(lambda: dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True))
    assert ("Rank 2 failed to pass monitoredBarrier in 2000 ms" in text) == (rank == 0), text
    store.set(f"done/{rank}", "")


@pytest.mark.skipif(TORCH_VERSION < (2, 15), reason="torch.distributed has it for Gloo alone")
def test_monitored_barrier_where_the_first_rank_of_a_host_comes_last(tmp_path: Path) -> None:
    outcomes = run_fresh_processes(_first_comes_last, 4, str(tmp_path / "store"), init=False, timeout=60)
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.stderr


def _second_gloo_fails_on_one(rank: int, world_size: int, path: str) -> None:
    made = []
    gloo = dist.ProcessGroupGloo

    def make(*arguments: object, **keywords: object) -> object:
        made.append(arguments)
        if rank == 1 and len(made) == 2:
            raise RuntimeError("no descriptors are left")
        return gloo(*arguments, **keywords)

    dist.ProcessGroupGloo = make
    _join(rank, path)
    dist.ProcessGroupGloo = gloo
    assert dist.group.WORLD._get_backend(torch.device("cpu")).transport == "gloo"
    total = torch.ones(100_000)
    dist.all_reduce(total)
    assert (total == world_size).all()


def test_a_column_that_can_not_be_made_leaves_a_flat_group(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    env = {"HORON_CARRIER": "gloo"}
    outcomes = run_fresh_processes(_second_gloo_fails_on_one, len(HOSTS), path, init=False, timeout=60, env=env)
    for outcome in outcomes:
        assert outcome.exitcode == 0, outcome.stderr
    assert "no descriptors are left" in outcomes[1].stderr
