"""Bad ends, in fresh processes: killed peers, timeouts, abort, exits with work pending. Nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gpu_harness import assert_clean_exits, on_simulator, run_fresh_processes
from gpu_tensors import check_equal, on_gpu, output
from harness import expect_error, store

DEATH_S = 10.0
"""Within which survivors must notice a death."""
KINDS = ["all_reduce", "all_gather_into_tensor", "broadcast", "all_to_all_single", "recv", "barrier"]


def _sum_is_right(rank: int, n: int, count: int = 1000) -> None:
    tensor = on_gpu(torch.full((count,), float(rank)))
    dist.all_reduce(tensor)
    check_equal(tensor, torch.full((count,), n * (n - 1) / 2))


def _start(kind: str, rank: int, n: int) -> dist.Work:
    """An operation that needs the last rank."""
    mine = on_gpu(torch.full((n * 1000,), float(rank)))
    found = output(n * n * 1000, torch.float32)
    if kind == "all_reduce":
        return dist.all_reduce(mine, async_op=True)
    if kind == "all_gather_into_tensor":
        return dist.all_gather_into_tensor(found, mine, async_op=True)
    if kind == "broadcast":
        return dist.broadcast(mine, n - 1, async_op=True)
    if kind == "all_to_all_single":
        return dist.all_to_all_single(found[: n * 1000], mine, async_op=True)
    if kind == "recv":
        return dist.irecv(mine, n - 1)
    return dist.barrier(async_op=True)


def _until_it_fails(start: Callable[[], dist.Work], within_s: float = DEATH_S) -> None:
    """Calls, waits, synchronizes, and calls again. The host is not blocked by wait(), so an error may come at any."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        start().wait()
        torch.cuda.synchronize()


def _killed_peer(rank: int, n: int, kind: str) -> None:
    _sum_is_right(rank, n)
    if kind != "recv":  # Connects.
        _start(kind, rank, n).wait()
    torch.cuda.synchronize()
    if rank == n - 1:
        store().wait([f"in{r}" for r in range(rank)])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    store().set(f"in{rank}", "1")
    message = expect_error(lambda: _until_it_fails(lambda: _start(kind, rank, n)), within_s=DEATH_S)
    assert f"rank {n - 1}" in message.lower(), message
    expect_error(lambda: _until_it_fails(lambda: _start("all_reduce", rank, n)), within_s=DEATH_S)
    dist.destroy_process_group()


# Over sockets NCCL reports at once that a connection broke, and not whose it was.
AS_OVER_SOCKETS = {"HORON_SIMULATOR_REMOTE_ERROR": "1"}
reports = pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="as it is"),
        pytest.param(
            AS_OVER_SOCKETS, id="reported", marks=pytest.mark.skipif(not on_simulator(), reason="the simulator's")
        ),
    ],
)


@pytest.mark.horon_only
@reports
@pytest.mark.parametrize("kind", KINDS)
def test_killed_peer_is_an_error_that_names_it(kind: str, env: dict[str, str]) -> None:
    outcomes = run_fresh_processes(_killed_peer, 3 if kind == "all_reduce" else 2, kind, timeout=60, env=env)
    assert_clean_exits(outcomes, [0] * (len(outcomes) - 1) + [-signal.SIGKILL])


def _killed_before_connecting(rank: int, n: int) -> None:
    dist.all_reduce(torch.ones(3))  # On the CPU: there is no communicator yet.
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message = expect_error(lambda: _until_it_fails(lambda: _start("all_reduce", rank, n)), within_s=DEATH_S)
    assert "rank 1" in message.lower(), message


@pytest.mark.horon_only
def test_killed_before_the_first_operation_on_the_gpu() -> None:
    assert_clean_exits(run_fresh_processes(_killed_before_connecting, 2, timeout=60), [0, -signal.SIGKILL])


def _killed_in_named(rank: int, n: int) -> None:
    import horon.torch as hvd

    hvd.init()
    x = on_gpu(torch.ones(1000))
    hvd.allreduce(x, name="x")
    if rank == 1:
        store().wait(["in"])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    store().set("in", "1")

    def until_it_fails() -> None:
        end_s = time.monotonic() + DEATH_S
        while time.monotonic() < end_s:
            hvd.allreduce(x, name="x")
            torch.cuda.synchronize()

    message = expect_error(until_it_fails, within_s=DEATH_S)
    assert "HorovodInternalError" in message and "rank 1" in message.lower(), message


@pytest.mark.horon_only
@reports
def test_killed_peer_in_a_named_operation(env: dict[str, str]) -> None:
    assert_clean_exits(run_fresh_processes(_killed_in_named, 2, timeout=60, env=env), [0, -signal.SIGKILL])


def _timeout(rank: int, n: int) -> None:
    _sum_is_right(rank, n)
    if rank == 1:
        store().wait(["over"], timedelta(seconds=40))
    else:
        message = expect_error(lambda: _until_it_fails(lambda: _start("all_reduce", rank, n), 20), within_s=20)
        assert "all_reduce" in message.lower() or "allreduce" in message.lower(), message
        assert "rank 1" in message.lower() or "ranks 1" in message.lower() or "ranks [1]" in message.lower(), message
        store().set("over", "1")
    os._exit(0)


@pytest.mark.horon_only
def test_timeout_names_the_operation_and_who_did_not_come() -> None:
    assert_clean_exits(run_fresh_processes(_timeout, 2, timeout=60, group_timeout_s=4))


def _aborted(rank: int, n: int) -> None:
    _sum_is_right(rank, n)
    if rank == 0:
        work = _start("all_reduce", rank, n)
        started_s = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        torch.cuda.synchronize()
        assert time.monotonic() - started_s < DEATH_S
        del work
    else:
        time.sleep(3)
    os._exit(0)


@pytest.mark.parametrize("n", [1, 2])
def test_abort_frees_the_gpu(n: int) -> None:
    assert_clean_exits(run_fresh_processes(_aborted, n, timeout=60))


def _destroyed_with_work_pending(rank: int, n: int) -> None:
    _sum_is_right(rank, n)
    tensors = [on_gpu(torch.full((1 << 20,), float(rank + 1))) for _ in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    torch.cuda.synchronize()
    for tensor in tensors:
        check_equal(tensor, torch.full((1 << 20,), n * (n + 1) / 2))


@pytest.mark.parametrize("n", [1, 2])
def test_destroy_with_work_pending_lets_it_finish(n: int) -> None:
    assert_clean_exits(run_fresh_processes(_destroyed_with_work_pending, n, timeout=60))


def _exit_without_destroy(rank: int, n: int, how: str) -> None:
    _sum_is_right(rank, n)
    if how == "second group":
        group = dist.new_group()
        dist.all_reduce(on_gpu(torch.ones(5)), group=group)
    elif how == "pending on both":
        globals()["kept"] = [dist.all_reduce(on_gpu(torch.ones(70001)), async_op=True) for _ in range(20)]
    elif how == "pending on one" and rank == 0:
        globals()["kept"] = [dist.all_reduce(on_gpu(torch.ones(count)), async_op=True) for count in (1, 70001)]
    elif how == "pending with callback":
        work = dist.all_reduce(on_gpu(torch.ones(5)), async_op=True)
        globals()["kept"] = work.get_future().then(lambda done: done.value())


HOWS = ["finished", "second group", "pending on both", "pending on one", "pending with callback"]


@pytest.mark.horon_only
@pytest.mark.parametrize("how", HOWS)
def test_exit_without_destroy(how: str) -> None:
    assert_clean_exits(run_fresh_processes(_exit_without_destroy, 2, how, timeout=60))


def _raises(rank: int, n: int) -> None:
    _sum_is_right(rank, n)
    if rank == 1:
        globals()["kept"] = dist.all_reduce(on_gpu(torch.ones(10)), async_op=True)
        raise ValueError("in the middle of training")
    message = expect_error(lambda: _until_it_fails(lambda: _start("broadcast", rank, n)), within_s=DEATH_S)
    assert "rank 1" in message.lower(), message


@pytest.mark.horon_only
def test_exit_in_the_middle_of_an_exception() -> None:
    outcomes = run_fresh_processes(_raises, 2, timeout=60)
    assert_clean_exits(outcomes, [0, 1])
    assert "in the middle of training" in outcomes[1].stderr


def _finished_before_exit(rank: int, n: int) -> None:
    """Rank 0 leaves right after its last collective; the other has its result."""
    _sum_is_right(rank, n)
    tensor = on_gpu(torch.full((70001,), float(rank)))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    if rank == 0:
        torch.cuda.synchronize()
        return
    time.sleep(0.5)
    check_equal(tensor, torch.full((70001,), n * (n - 1) / 2))


@pytest.mark.horon_only
def test_exit_right_after_the_last_collective_fails_nobody() -> None:
    for _ in range(3):
        assert_clean_exits(run_fresh_processes(_finished_before_exit, 2, timeout=60))
