"""send and recv in groups that span hosts, to ranks of the same host and of another one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks
from host_groups import group_over_hosts, join

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo: knows nothing of hosts")

LAYOUTS = [[0, 1], [0, 0, 1], [0, 1, 0, 1]]
"""Host of each rank."""


def _messages(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        peer = (rank + world_size // 2) % world_size if world_size % 2 == 0 else -1
        for count in (0, 1, 300_000) if peer >= 0 else ():
            got = torch.empty(count)
            operations = [
                dist.P2POp(dist.irecv, got, peer, tag=3),
                dist.P2POp(dist.isend, torch.full((count,), float(rank)), peer, tag=3),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert (got == peer).all()
        last = world_size - 1
        for count in (7, 0, 50_000):
            if rank == 0:
                dist.send(torch.ones(count), last)
            elif rank == last:
                got = torch.zeros(count)
                assert dist.recv(got) == 0 and (got == 1).all()
        # What is not contiguous goes as it does within a host.
        table = torch.arange(12.0).reshape(3, 4)
        if rank == 0:
            dist.send(table.t(), last)
        elif rank == last:
            whole = torch.zeros(4, 6)
            dist.recv(whole[:, ::2], 0)
            assert torch.equal(whole[:, ::2], table.t()) and (whole[:, 1::2] == 0).all()


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_messages(hosts: list[int], tmp_path: Path) -> None:
    run_ranks(_messages, len(hosts), hosts, str(tmp_path / "store"), init=False)


@pytest.mark.parametrize("env", [{"HORON_CARRIER": "gloo"}, {"HORON_HIERARCHICAL": "off"}])
def test_messages_in_other_ways(env: dict[str, str], tmp_path: Path) -> None:
    run_ranks(_messages, 3, [0, 0, 1], str(tmp_path / "store"), init=False, env=env)


def _from_any_source(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        for count in (3, 200_000):
            if rank == 0:
                got = torch.empty(count)
                sources = []
                for _ in range(world_size - 1):
                    sources.append(dist.recv(got, tag=count))
                    assert (got == sources[-1]).all()
                assert sorted(sources) == list(range(1, world_size))
            else:
                dist.send(torch.full((count,), float(rank)), 0, tag=count)


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1, 0]])
def test_any_source_takes_what_comes_from_this_host_and_from_others(hosts: list[int], tmp_path: Path) -> None:
    run_ranks(_from_any_source, len(hosts), hosts, str(tmp_path / "store"), init=False)


def _beside_collectives(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    """Random messages from one thread, to be received by another, while the group goes on."""
    with group_over_hosts(rank, hosts, path):
        choices = random.Random(5)
        plan = [
            (*choices.sample(range(world_size), 2), choices.choice([0, 1, 1000, 16_384, 16_385, 400_000]))
            for _ in range(120)
        ]
        errors: list[BaseException] = []

        def send() -> None:
            try:
                for number, (source, destination, count) in enumerate(plan):
                    if source == rank:
                        dist.send(torch.full((count,), float(number)), destination, tag=number)
            except BaseException as error:
                errors.append(error)

        def receive() -> None:
            try:
                for number, (source, destination, count) in enumerate(plan):
                    if destination == rank:
                        got = torch.empty(count)
                        assert dist.recv(got, source, tag=number) == source
                        assert (got == number).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=target) for target in (send, receive)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            total = torch.ones(5000)
            dist.all_reduce(total)
            assert (total == world_size).all()
        for thread in threads:
            thread.join()
        assert not errors, errors
        dist.barrier()


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1, 1]])
def test_messages_of_several_threads_beside_collectives(hosts: list[int], tmp_path: Path) -> None:
    run_ranks(_beside_collectives, len(hosts), hosts, str(tmp_path / "store"), init=False)


def _futures(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        called = threading.Event()
        if rank == 0:
            work = dist.irecv(torch.empty(100_000), 1)
            assert not work.is_completed()
            work.get_future().then(lambda _: called.set())
            dist.barrier()
            assert called.wait(20)  # nobody waits for the message itself
            assert work.is_completed()
        else:
            dist.barrier()
            dist.send(torch.ones(100_000), 0)


def test_a_callback_comes_without_anybody_who_waits(tmp_path: Path) -> None:
    run_ranks(_futures, 2, [0, 1], str(tmp_path / "store"), init=False)


def _sizes_differ(rank: int, world_size: int, hosts: list[int], path: str) -> None:
    with group_over_hosts(rank, hosts, path):
        for count in (4, 100_000):
            if rank == 0:
                expect_error(lambda n=count: dist.send(torch.ones(n), 2), f"receiver expects {4 * count + 4} bytes")
            elif rank == 2:
                expect_error(lambda n=count: dist.recv(torch.ones(n + 1), 0), f"sender sent {4 * count} bytes")
            total = torch.ones(3)
            dist.all_reduce(total)
            assert (total == world_size).all()


def test_different_sizes_are_an_error_on_both_ends(tmp_path: Path) -> None:
    run_ranks(_sizes_differ, 3, [0, 0, 1], str(tmp_path / "store"), init=False)


def _killed(rank: int, world_size: int, path: str, victim: int, source: int | None) -> None:
    join(rank, [0, 0, 1, 1], path)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error(lambda: dist.recv(torch.ones(3), source), f"rank {victim} (pid ", "died", within_s=10)
    dist.destroy_process_group()


@pytest.mark.parametrize(("victim", "source"), [(3, 3), (3, None)])
def test_a_dead_sender_is_named(victim: int, source: int | None, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_killed, 4, path, victim, source, init=False, timeout=60)
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == victim else 0 for rank in range(4)])


def _killed_half_way(rank: int, world_size: int, path: str) -> None:
    join(rank, [0, 1], path)
    large = torch.ones(50_000_000)
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        while True:
            dist.send(large, 0)

    def receive() -> None:
        while True:
            dist.recv(large, 1)

    expect_error(receive, "rank 1 (pid ", "died", within_s=20)
    dist.destroy_process_group()


def test_a_sender_that_dies_in_the_middle_of_messages(tmp_path: Path) -> None:
    outcomes = run_fresh_processes(_killed_half_way, 2, str(tmp_path / "store"), init=False, timeout=60)
    assert_clean_exits(outcomes, [0, -signal.SIGKILL])


def _one_end_for_all(rank: int, world_size: int, path: str, fails: str) -> None:
    join(rank, [0, 1], path)
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier()
    pending = dist.irecv(torch.ones(3), 1 - rank, group, tag=7)
    if fails == "message":
        if rank == 0:
            expect_error(lambda: dist.recv(torch.ones(3), 1, group), "2000ms for rank 1", within_s=10)
        time.sleep(4)
        expect_error(lambda: dist.all_reduce(torch.ones(3), group=group), "timed out")
    elif rank == 0:
        expect_error(lambda: dist.all_reduce(torch.ones(3), group=group), "2000ms for rank 1", within_s=10)
    expect_error(pending.wait, within_s=10)
    total = torch.ones(3)
    dist.all_reduce(total)  # of the other group
    assert (total == world_size).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("fails", ["message", "collective"])
def test_messages_and_collectives_end_together(fails: str, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert_clean_exits(run_fresh_processes(_one_end_for_all, 2, path, fails, init=False, timeout=60))


def _leaves(rank: int, world_size: int, path: str) -> None:
    join(rank, [0, 0, 1], path)
    if rank == 2:
        for count in (3, 1_000_000):
            dist.isend(torch.full((count,), 5.0), 0)
        dist.destroy_process_group()
        return
    if rank == 0:
        for count in (3, 1_000_000):
            got = torch.empty(count)
            dist.recv(got, 2)
            assert (got == 5).all()
        expect_error(lambda: dist.recv(torch.ones(3), 2), "rank 2 (pid ", "left the group", within_s=10)
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(3), 0)
    dist.destroy_process_group()


def test_what_a_rank_sent_before_it_left_arrives(tmp_path: Path) -> None:
    assert_clean_exits(run_fresh_processes(_leaves, 3, str(tmp_path / "store"), init=False, timeout=60))


def _timeout(rank: int, world_size: int, path: str) -> None:
    join(rank, [0, 1, 1], path)
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier()
    if rank == 0:
        expect_error(lambda: dist.recv(torch.ones(3), 1, group), "DistBackendError", "3000ms for rank 1", within_s=10)
    else:
        # Nobody sends it anything: it hears why the group has ended, before its own time is over.
        time.sleep(1.5)
        source = 3 - rank
        expect_error(lambda: dist.recv(torch.ones(3), source, group), "rank 0: recv of 12 bytes from rank 1")
    dist.destroy_process_group()


def test_a_timeout_is_told_on_every_host(tmp_path: Path) -> None:
    assert_clean_exits(run_fresh_processes(_timeout, 3, str(tmp_path / "store"), init=False, timeout=60))
