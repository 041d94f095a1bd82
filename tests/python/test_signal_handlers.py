"""Signal handlers that run in the middle of an operation: what they raise, and what they may call."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, gloo_lacks, run_fresh_processes, store


class _Stop(Exception):
    """What a handler raises."""


def _signal_soon(number: int = signal.SIGUSR1, after_s: float = 0.7) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), number)).start()


def _until(key: str) -> None:
    store().wait([key], timedelta(seconds=25))


def _raises(*_: object) -> None:
    raise _Stop


def _waits_again(rank: int, world_size: int) -> None:
    if rank == 1:
        _until("done")
        return
    signal.signal(signal.SIGUSR1, _raises)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    _signal_soon()
    with pytest.raises(_Stop):
        works[2].wait()
    for work in (*works, works[0]):
        message = expect_error(work.wait, "DistBackendError", within_s=5)
        assert "signal" in message or "interrupted" in message, message
    expect_error(lambda: works[0].get_future().wait(), within_s=5)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).get_error().name == "COMM_ERROR"
    store().set("done", "1")


def test_works_that_were_interrupted_can_be_waited_for_again() -> None:
    gloo_lacks("runs handlers after the wait")
    assert_clean_exits(run_fresh_processes(_waits_again, 2, timeout=40))


def _uses_the_group(rank: int, world_size: int, kind: str) -> None:
    tensor = torch.ones(4)
    if rank == 1:
        _until("failed")
        expect_error(lambda: dist.all_reduce(tensor), within_s=10)
        store().set("done", "1")
        return
    called = []
    common = store()  # of the group, which one of the handlers destroys

    def handler(*_: object) -> None:
        called.append(kind)
        if kind == "barrier":
            dist.barrier()
        elif kind == "wait":
            dist.all_reduce(tensor.clone(), async_op=True).wait()
        elif kind == "destroy":
            dist.destroy_process_group()
        else:
            dist.group.WORLD.abort()

    signal.signal(signal.SIGUSR1, handler)
    _signal_soon()
    message = expect_error(lambda: dist.all_reduce(tensor), within_s=8)
    common.set("failed", "1")
    assert called == [kind]
    if kind in ("barrier", "wait"):
        assert "signal handler" in message, message
    common.wait(["done"], timedelta(seconds=25))


@pytest.mark.parametrize("kind", ["barrier", "wait", "destroy", "abort"])
def test_a_handler_that_uses_the_group_does_not_hang(kind: str) -> None:
    gloo_lacks("runs handlers after the operation")
    assert_clean_exits(run_fresh_processes(_uses_the_group, 2, kind, timeout=40))


def _catches(rank: int, world_size: int, kind: str) -> None:
    tensor = torch.ones(4)
    if rank == 1:
        _until("handled")
    else:
        messages = []

        def handler(*_: object) -> None:
            call = dist.barrier if kind == "barrier" else dist.all_reduce(tensor.clone(), async_op=True).wait
            messages.append(expect_error(call, "DistBackendError", within_s=5))
            store().set("handled", "1")

        signal.signal(signal.SIGUSR1, handler)
        _signal_soon()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4
    if kind == "wait":  # what the handler has issued is an operation like any other
        other = torch.ones(4)
        if rank == 1:
            dist.all_reduce(other)
    if rank == 0:
        assert len(messages) == 1
        assert "signal handler" in messages[0], messages
    dist.barrier()


@pytest.mark.parametrize("kind", ["barrier", "wait"])
def test_a_handler_that_catches_its_error_leaves_the_group_usable(kind: str) -> None:
    gloo_lacks("runs handlers after the operation")
    assert_clean_exits(run_fresh_processes(_catches, 2, kind, timeout=40))


def _behind_another(rank: int, world_size: int) -> None:
    if rank == 1:
        _until("done")
        return
    pending = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    pending.get_future()  # the group's own thread runs it
    _signal_soon(signal.SIGINT)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()
    assert time.monotonic() - began_s < 8
    expect_error(pending.wait, within_s=5)
    store().set("done", "1")


def test_ctrl_c_behind_an_operation_that_does_not_end() -> None:
    gloo_lacks("does not look at signals")
    assert_clean_exits(run_fresh_processes(_behind_another, 2, timeout=40))


def _named(rank: int, world_size: int, kind: str) -> None:
    import horon.torch as hvd

    hvd.init()
    if rank == 1:
        time.sleep(2.5)
        if kind == "shutdown":
            expect_error(lambda: hvd.allreduce(torch.ones(4), name="x"), within_s=10)
        else:  # what the other rank has given up to wait for goes on
            hvd.allreduce(torch.ones(4), name="x")
        store().set("done", "1")
        return
    signal.signal(
        signal.SIGUSR1,
        lambda *_: hvd.shutdown() if kind == "shutdown" else hvd.allreduce(torch.ones(4), name="y"),
    )
    _signal_soon()
    message = expect_error(lambda: hvd.allreduce(torch.ones(4), name="x"), within_s=8)
    assert "signal handler" in message, message
    _until("done")


@pytest.mark.parametrize("kind", ["shutdown", "allreduce"])
def test_a_handler_that_uses_horovods_api_does_not_hang(kind: str) -> None:
    gloo_lacks("is not Horovod")
    assert_clean_exits(run_fresh_processes(_named, 2, kind, timeout=40))
