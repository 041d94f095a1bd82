"""Bad ends, in fresh processes: killed peers, exits at any moment, Ctrl-C, timeouts. Nobody hangs, nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import shm_entries
from harness import (
    STALL_S,
    STRESS,
    assert_clean_exits,
    expect_error,
    gloo_lacks,
    on_gloo,
    run_fresh_processes,
    store,
)
from operations import KINDS, start

DEATH_S = 10.0
"""Within which survivors must notice a death."""


@pytest.fixture(autouse=True)
def nothing_in_shm(shm_before: set[str]) -> Iterator[None]:
    """No test of this file may leave anything in /dev/shm, however its processes ended."""
    yield
    if not on_gloo():
        assert not shm_entries() - shm_before


def _sum_is_right(rank: int, world_size: int, count: int = 10) -> None:
    tensor = torch.full((count,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(world_size))).all()


def _blocking(kind: str, rank: int, world_size: int, count: int) -> None:
    """A call of that kind that cannot finish without the last rank."""
    peer = world_size - 1
    if kind == "send":
        dist.send(torch.ones(8 << 20), peer)
    elif kind == "recv":
        dist.recv(torch.zeros(count), peer)
    elif kind == "recv any":
        dist.recv(torch.zeros(count))
    elif kind == "synchronous all_reduce":
        dist.all_reduce(torch.ones(count))
    elif kind == "batch_isend_irecv":
        operations = [
            dist.P2POp(dist.irecv, torch.zeros(count), peer),
            dist.P2POp(dist.isend, torch.ones(8 << 20), peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    else:
        start(kind, rank, world_size, count)[0].wait()


def _killed_peer(rank: int, world_size: int, kind: str, count: int) -> None:
    _sum_is_right(rank, world_size)
    if rank == world_size - 1:
        store().wait([f"in{r}" for r in range(rank)])
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    store().set(f"in{rank}", "1")
    message = expect_error(lambda: _blocking(kind, rank, world_size, count), within_s=DEATH_S)
    if not on_gloo():
        assert f"rank {world_size - 1}" in message.lower(), message
        expect_error(lambda: dist.all_reduce(torch.ones(3)), within_s=DEATH_S)
    dist.destroy_process_group()


P2P_KINDS = ["send", "recv", "recv any", "batch_isend_irecv"]
GLOO_NOTICES = {"all_reduce", "synchronous all_reduce", "all_gather", "all_to_all", "recv"}


def _kill(kind: str, world_size: int, count: int) -> None:
    if kind not in GLOO_NOTICES:
        gloo_lacks("a root, or a sender, does not notice")
    codes = [0] * (world_size - 1) + [-signal.SIGKILL]
    outcomes = run_fresh_processes(_killed_peer, world_size, kind, count, timeout=30)
    assert_clean_exits(outcomes, codes)


@pytest.mark.parametrize("kind", [*KINDS, "synchronous all_reduce", *P2P_KINDS])
def test_killed_peer_is_an_error_in_every_operation(kind: str) -> None:
    _kill(kind, 2, 10)


@pytest.mark.parametrize("kind", [*KINDS, "synchronous all_reduce", "recv"])
def test_killed_peer_is_an_error_on_all_survivors(kind: str) -> None:
    _kill(kind, 3, 1 << 20)


def _killed_in_transfer(rank: int, world_size: int) -> None:
    _sum_is_right(rank, world_size)
    if rank == 1:
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.start()
    start_s = time.monotonic()
    tensor = torch.ones(4 << 20)

    def work_until_it_fails() -> None:
        while time.monotonic() < start_s + DEATH_S:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    expect_error(work_until_it_fails, within_s=DEATH_S)


def test_peer_killed_in_the_middle_of_transfers() -> None:
    assert_clean_exits(run_fresh_processes(_killed_in_transfer, 2, timeout=30), [0, -signal.SIGKILL])


def _exit_without_destroy(rank: int, world_size: int, how: str) -> None:
    _sum_is_right(rank, world_size)
    _sum_is_right(rank, world_size, 70001)
    dist.new_group()
    dist.barrier()
    if how == "async finished":
        for _ in range(20):
            dist.all_reduce(torch.ones(70001), async_op=True).wait()
    elif how == "pending on both":
        globals()["kept"] = [dist.all_reduce(torch.ones(70001), async_op=True) for _ in range(20)]
    elif how == "pending on one" and rank == 0:
        globals()["kept"] = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 70001, 1)]
    elif how == "pending receive" and rank == 0:
        globals()["kept"] = [dist.irecv(torch.ones(n), 1) for n in (1, 70001)]
    elif how == "pending with callback" and rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        globals()["kept"] = work.get_future().then(lambda f: print("callback"))
    elif how == "waiting thread" and rank == 0:
        threading.Thread(target=dist.barrier, daemon=True).start()
        time.sleep(0.2)
    elif how == "issuing threads":
        for _ in range(2):
            threading.Thread(target=_issue_for_ever, args=(rank,), daemon=True).start()
        time.sleep(0.2)


def _issue_for_ever(rank: int) -> None:
    # No tensor is made here: a daemon thread that makes one while the process ends is torch's own way to abort.
    sent, received, summed = (torch.ones(1) for _ in range(3))
    while True:
        with contextlib.suppress(RuntimeError):
            dist.isend(sent, 1 - rank).is_completed()
            dist.irecv(received, 1 - rank).is_completed()
            dist.all_reduce(summed, async_op=True).get_future()


HOWS = [
    "finished",
    "async finished",
    "pending on both",
    "pending on one",
    "pending receive",
    "pending with callback",
    "waiting thread",
    "issuing threads",
]


@pytest.mark.parametrize("how", HOWS)
def test_exit_without_destroy(how: str) -> None:
    if how not in HOWS[:2]:
        gloo_lacks("aborts or hangs at exit with operations pending")
    assert_clean_exits(run_fresh_processes(_exit_without_destroy, 2, how, timeout=25))


def _raises(rank: int, world_size: int) -> None:
    _sum_is_right(rank, world_size)
    if rank == 1:
        globals()["kept"] = dist.all_reduce(torch.ones(10), async_op=True)
        raise ValueError("in the middle of training")
    message = expect_error(lambda: _blocking("broadcast", rank, world_size, 10), within_s=DEATH_S)
    assert "rank 1" in message.lower() or on_gloo(), message


def test_exit_in_the_middle_of_an_exception() -> None:
    gloo_lacks("a broadcast's root does not notice")
    outcomes = run_fresh_processes(_raises, 2, timeout=25)
    assert_clean_exits(outcomes, [0, 1])
    assert "in the middle of training" in outcomes[1].stderr


def _system_exit(rank: int, world_size: int) -> None:
    _sum_is_right(rank, world_size)
    sys.exit(3 + rank)


def test_exit_code_is_kept() -> None:
    assert_clean_exits(run_fresh_processes(_system_exit, 2), [3, 4])


def _exits_after_last(rank: int, world_size: int, how: str, count: int) -> None:
    _sum_is_right(rank, world_size)
    tensor = torch.full((count,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        work.wait()
        if how == "abrupt":
            os._exit(0)
        return
    time.sleep(0.002 * (count % 7))
    work.wait()
    assert (tensor == sum(range(world_size))).all()


@pytest.mark.parametrize("how", ["normal", "abrupt"])
def test_exit_right_after_the_last_collective_fails_nobody(how: str) -> None:
    gloo_lacks("the others see a closed connection")
    for turn in range(1000 if STRESS else 25):
        count = [3, 5, 70001, 1][turn % 4] + turn % 7
        outcomes = run_fresh_processes(_exits_after_last, 2 + (turn % 10 == 0), how, count, timeout=30)
        try:
            assert_clean_exits(outcomes)
        except AssertionError as error:
            raise AssertionError(f"turn {turn}, {count} elements: {error}") from None


class _DeadlyStore(dist.Store):
    """Kills the process once it has said that it is there, or before it says that it has joined."""

    def __init__(self, inner: dist.Store, when: str) -> None:
        super().__init__()
        self._inner = inner
        self._when = when

    def set(self, key: str, value: Any) -> None:
        if self._when == "joined" and "joined/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.set(key, value)
        if self._when == "there" and "member/" in key:
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=50)) -> None:
        self._inner.wait(keys, timeout)


def _killed_while_the_group_is_made(rank: int, world_size: int, path: str, victim: int, when: str) -> None:
    inner = dist.FileStore(path, world_size)
    began_s = time.monotonic()
    message = expect_error(
        lambda: dist.init_process_group(
            "horon",
            store=_DeadlyStore(inner, when) if rank == victim else inner,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=50),
        )
    )
    assert time.monotonic() - began_s < 20
    assert f"rank {victim} (pid" in message and "died while the group was made" in message, message


@pytest.mark.parametrize("when", ["there", "joined"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_while_a_group_is_made(tmp_path: Path, victim: int, when: str) -> None:
    gloo_lacks("waits for the timeout")
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_killed_while_the_group_is_made, 3, path, victim, when, init=False, timeout=60)
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == victim else 0 for rank in range(3)])


class _StoppingStore(_DeadlyStore):
    """Stops the process once it has said that it is there, having left its pid."""

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)
        if "member/" in key:
            self._inner.set("stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


def _stopped_while_the_group_is_made(rank: int, world_size: int, path: str, victim: int) -> None:
    inner = dist.FileStore(path, world_size)
    timeout_s = 3.0
    if rank != victim:  # whose process is stopped, whatever it takes to import and to start
        inner.wait(["stopped"], timedelta(seconds=50))
    began_s = time.monotonic()
    message = expect_error(
        lambda: dist.init_process_group(
            "horon",
            store=_StoppingStore(inner, "") if rank == victim else inner,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    )
    blamed = message.partition("Timed out waiting")[2]
    named = [other for other in range(world_size) if f"rank {other} (pid" in blamed]
    assert named == [victim], message
    inner.add("given up", 1)
    if rank == victim:
        resumed_s = time.monotonic() - float(inner.get("resumed"))
        assert "has given up" in message and resumed_s < STALL_S, (message, resumed_s)
    elif rank == min(other for other in range(world_size) if other != victim):
        assert time.monotonic() - began_s < timeout_s + STALL_S
        while inner.add("given up", 0) < world_size - 1:
            time.sleep(0.01)
        inner.set("resumed", str(time.monotonic()))
        os.kill(int(inner.get("stopped")), signal.SIGCONT)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_stopped_while_a_group_is_made(tmp_path: Path, victim: int) -> None:
    gloo_lacks("names nobody")
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_stopped_while_the_group_is_made, 4, path, victim, init=False, timeout=60)
    assert_clean_exits(outcomes)
    assert not any("counts as another host" in outcome.stderr for outcome in outcomes), outcomes


class _CountingStore(_DeadlyStore):
    """Counts who has said that it is there."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__(inner, "")

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)
        if "member/" in key:
            self._inner.add("came", 1)


def _come_with_rank_1_again(process: int, n_processes: int, path: str, is_complete: bool) -> None:
    """Ranks 0, 1, 1 and so on, one after the other."""
    rank = min(process, 1)
    n_ranks = 2 if is_complete else 3
    inner = dist.FileStore(path, n_ranks)
    while inner.add("came", 0) < process:
        time.sleep(0.01)
    is_refused = process == 2 or not is_complete
    timeout = timedelta(seconds=3 if is_refused and is_complete else 50)

    def meet() -> None:
        dist.init_process_group("horon", store=_CountingStore(inner), rank=rank, world_size=n_ranks, timeout=timeout)

    if is_refused:
        expect_error(meet, "rank 1 has come twice to the group of", "which is alive", "RANK of its own", within_s=10)
        inner.add("refused", 1)
        while not is_complete and inner.add("refused", 0) < n_processes:  # who has ended is no second one
            time.sleep(0.01)
    else:
        meet()
        _sum_is_right(rank, n_ranks)
        while inner.add("refused", 0) == 0:
            time.sleep(0.01)


@pytest.mark.parametrize("n_processes", [3, 4])
def test_several_processes_with_one_rank_in_the_place_of_another(tmp_path: Path, n_processes: int) -> None:
    gloo_lacks("waits for the timeout")
    path = str(tmp_path / "store")
    assert_clean_exits(run_fresh_processes(_come_with_rank_1_again, n_processes, path, False, init=False, timeout=60))


def test_a_second_process_with_a_rank_of_a_group_that_is_complete(tmp_path: Path) -> None:
    gloo_lacks("waits for the timeout")
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_come_with_rank_1_again, 3, path, True, init=False, timeout=60)
    assert_clean_exits(outcomes)
    assert ["has come twice" in outcome.stderr for outcome in outcomes] == [False, False, True]


def _dead_before_a_group_is_made(rank: int, world_size: int) -> None:
    _sum_is_right(rank, world_size)
    if rank == 2:
        store().set("pid", str(os.getpid()))
        store().wait(["making"])
        os.kill(os.getpid(), signal.SIGKILL)
    store().wait(["pid"])
    began_s = time.monotonic()
    store().set("making", "1")
    message = expect_error(lambda: dist.new_group([0, 1, 2], timeout=timedelta(seconds=50)))
    assert time.monotonic() - began_s < 20
    pid = store().get("pid").decode()
    assert f"rank 2 (pid {pid}) died before the group of ranks 0, 1 and 2 was made" in message, message
    left = dist.new_group([0, 1], timeout=timedelta(seconds=50))
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=left)
    assert (tensor == 2).all()


def test_new_group_with_a_rank_that_is_dead() -> None:
    gloo_lacks("waits for the timeout")
    outcomes = run_fresh_processes(_dead_before_a_group_is_made, 3, timeout=60)
    assert_clean_exits(outcomes, [0, 0, -signal.SIGKILL])


def _store_dies_with_rank_0(rank: int, world_size: int, path: str) -> None:
    ports = dist.FileStore(path, world_size)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if server is not None:
        ports.set("port", str(server.port))
    shared = server or dist.TCPStore("127.0.0.1", int(ports.get("port")), is_master=False)
    dist.init_process_group("horon", store=shared, rank=rank, world_size=world_size, timeout=timedelta(seconds=50))
    _sum_is_right(rank, world_size)
    pid = ports.get("pid").decode() if rank != 0 else ports.set("pid", str(os.getpid()))
    if rank == 0:
        ports.wait([f"ready {peer}" for peer in range(1, world_size)])
        os.kill(os.getpid(), signal.SIGKILL)
    ports.set(f"ready {rank}", "")
    expect_error(lambda: dist.all_reduce(torch.ones(3)), f"rank 0 (pid {pid}) died", within_s=DEATH_S)
    message = expect_error(lambda: dist.new_group(list(range(world_size))), within_s=DEATH_S)
    assert f"rank 0 (pid {pid}) died before the group of ranks 0, 1 and 2 was made" in message, message


def test_new_group_when_the_store_died_with_its_rank(tmp_path: Path) -> None:
    gloo_lacks("tells of a connection, not of a rank")
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_store_dies_with_rank_0, 3, path, init=False, timeout=60)
    assert_clean_exits(outcomes, [-signal.SIGKILL, 0, 0])


def _aborts_after_a_death(rank: int, world_size: int) -> None:
    _sum_is_right(rank, world_size)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        expect_error(lambda: dist.recv(torch.zeros(3), 2), "rank 2 (pid", within_s=DEATH_S)
        store().wait(["waiting"])
        _backend().abort()
        return
    work = dist.irecv(torch.zeros(3), 1)  # which needs nothing of rank 2
    assert work is not None
    store().set("waiting", "1")
    expect_error(work.wait, "rank 1 aborted the group", "rank 2 (pid", "died", within_s=DEATH_S)


def test_an_abort_after_a_death_tells_of_it() -> None:
    gloo_lacks("tells of a connection")
    assert_clean_exits(run_fresh_processes(_aborts_after_a_death, 3, timeout=40), [0, 0, -signal.SIGKILL])


def _interrupted(rank: int, world_size: int, kind: str, caught: bool) -> float | None:
    _sum_is_right(rank, world_size)
    if rank == 1:
        store().wait(["pid"])
        time.sleep(0.5)
        store().set("sent", str(time.monotonic()))
        os.kill(int(store().get("pid")), signal.SIGINT)
        store().wait(["interrupted"], timedelta(seconds=20))
        return None
    store().set("pid", str(os.getpid()))
    try:
        _blocking(kind, rank, world_size, 10)
    except KeyboardInterrupt:
        took_s = time.monotonic() - float(store().get("sent"))
        store().set("interrupted", "1")
        assert took_s < STALL_S, f"the interrupt took {took_s:.1f} s"
        if not caught:
            raise
        return took_s
    raise AssertionError("the call returned")


@pytest.mark.parametrize("kind", ["synchronous all_reduce", "all_reduce", "barrier", "recv", "send", "broadcast"])
def test_ctrl_c_in_a_blocked_operation(kind: str) -> None:
    gloo_lacks("does not look at signals")
    assert_clean_exits(run_fresh_processes(_interrupted, 2, kind, True, timeout=30))


def test_ctrl_c_that_nobody_catches_ends_the_process() -> None:
    gloo_lacks("does not look at signals")
    outcomes = run_fresh_processes(_interrupted, 2, "synchronous all_reduce", False, timeout=30)
    assert_clean_exits(outcomes, [-signal.SIGINT, 0])
    assert "KeyboardInterrupt" in outcomes[0].stderr


def _missing(rank: int, world_size: int, kind: str) -> None:
    _sum_is_right(rank, world_size)
    if rank == 1:
        store().wait(["seen"], timedelta(seconds=30))
        return
    start_s = time.monotonic()
    message = expect_error(lambda: _blocking(kind, rank, world_size, 10), within_s=8)
    took_s = time.monotonic() - start_s
    store().set("seen", "1")
    assert took_s > 1.5, f"timed out after {took_s:.1f} s, before the two seconds were over: {message}"
    if not on_gloo():
        assert "rank 1" in message.lower(), message
        word = {"synchronous all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}.get(kind, kind)
        assert word in message.lower(), message


@pytest.mark.parametrize(
    "kind", ["synchronous all_reduce", "all_reduce", "broadcast", "all_gather_into_tensor", "barrier", "recv"]
)
def test_group_timeout_names_the_missing_rank(kind: str) -> None:
    if kind == "broadcast":
        gloo_lacks("the root does not wait")
    assert_clean_exits(run_fresh_processes(_missing, 2, kind, group_timeout_s=2, timeout=30))


def _backend() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device("cpu"))


def _own_timeout(rank: int, world_size: int, how: str) -> None:
    _sum_is_right(rank, world_size)
    if rank == 1:
        store().wait(["seen"], timedelta(seconds=30))
        return
    options = dist.AllreduceOptions()
    if how == "operation":
        options.timeout = timedelta(seconds=1)
    elif hasattr(_backend(), "set_timeout"):
        _backend().set_timeout(timedelta(seconds=1))
    else:
        _backend()._set_default_timeout(timedelta(seconds=1))

    def call() -> None:
        work = _backend().allreduce([torch.ones(10)], options)
        if work is not None:
            work.wait()

    start_s = time.monotonic()
    expect_error(call, within_s=8)
    store().set("seen", "1")
    assert time.monotonic() - start_s > 0.7


@pytest.mark.parametrize("how", ["operation", "group"])
def test_timeouts_per_operation_and_changed_later(how: str) -> None:
    if how == "group":
        gloo_lacks("set_timeout is not effective everywhere")
    assert_clean_exits(run_fresh_processes(_own_timeout, 2, how, timeout=30))


def _late_rank(rank: int, world_size: int) -> None:
    _sum_is_right(rank, world_size)
    if rank == 1:
        store().wait(["seen"], timedelta(seconds=30))
    message = expect_error(lambda: _blocking("all_reduce", rank, world_size, 10), within_s=8)
    store().set("seen", "1")
    # The deadline of an operation ends the group for all ranks: no later call may hang or pair up wrongly.
    expect_error(lambda: _blocking("all_reduce", rank, world_size, 10), within_s=8)
    assert "rank 1" in message.lower() or rank == 1, message


def test_rank_that_comes_after_the_deadline_gets_an_error_too() -> None:
    gloo_lacks("the late rank waits for its own timeout")
    assert_clean_exits(run_fresh_processes(_late_rank, 2, group_timeout_s=2, timeout=40))
