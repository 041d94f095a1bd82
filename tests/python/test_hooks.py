"""torch 2.15's hooks: the flight recorder sees operations complete, or not; the NaN check raises; abort hooks run."""

from __future__ import annotations

import http.client
import json
import pickle
import socket
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, assert_clean_exits, expect_error, gloo_lacks, needs_torch_215, run_fresh_processes, store
from operations import KINDS, start

pytestmark = needs_torch_215
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}


def _entries() -> list[dict[str, Any]]:
    """The flight recorder's entries for our backend, oldest first."""
    from torch._C._distributed_c10d import _dump_fr_trace

    return pickle.loads(_dump_fr_trace(backend=BACKEND)).get("entries", [])


def _wait_completed(count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 10
    while True:
        entries = _entries()
        if len(entries) >= count and all(entry["state"] == "completed" for entry in entries):
            return entries
        if time.monotonic() > deadline:
            states = [(entry["profiling_name"], entry["state"]) for entry in entries]
            raise AssertionError(f"not {count} completed entries: {states}")
        time.sleep(0.05)


def _recorded(rank: int, world_size: int) -> None:
    for _ in range(5):
        dist.all_reduce(torch.ones(100))
    _wait_completed(5)
    for kind in KINDS:
        for count in (10, 300000):
            start(kind, rank, world_size, count)[0].wait()
    work = dist.isend(torch.ones(5), 1) if rank == 0 else dist.irecv(torch.ones(5), 0)
    assert work is not None
    work.wait()
    entries = _wait_completed(5 + 2 * len(KINDS))
    names = " ".join(entry["profiling_name"] for entry in entries).lower().replace("_", "")
    for word in ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier"):
        assert word in names, f"{word} was not recorded: {names}"
    dist.destroy_process_group()


def test_flight_recorder_sees_every_operation_complete() -> None:
    gloo_lacks("its own recording never completes some kinds")
    assert_clean_exits(run_fresh_processes(_recorded, 2, env=RECORDER))


def _recorded_in_backward(rank: int, world_size: int) -> None:
    works: list[Any] = []
    for _ in range(4):
        dist.barrier()
        value = torch.ones(1, requires_grad=True)
        value.register_hook(lambda _: works.append(dist.all_reduce(torch.ones(5000), async_op=True)))
        value.sum().backward()
    for work in works:
        work.wait()
    assert len(works) == 4
    _wait_completed(8)
    dist.destroy_process_group()


def test_flight_recorder_sees_operations_of_a_backward_pass_complete() -> None:
    gloo_lacks("its own recording never completes some kinds")
    assert_clean_exits(run_fresh_processes(_recorded_in_backward, 2, env=RECORDER))


def _never_waited(rank: int, world_size: int) -> None:
    kept = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(20)]
    dist.barrier()
    _wait_completed(21)
    assert len(kept) == 20


def test_flight_recorder_sees_unwaited_operations_complete() -> None:
    gloo_lacks("completes an entry only when it is waited for")
    assert_clean_exits(run_fresh_processes(_never_waited, 2, env=RECORDER))


def _timed_out(rank: int, world_size: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    if rank == 1:
        store().wait(["seen"], timedelta(seconds=30))
        return
    expect_error(lambda: dist.broadcast(torch.ones(10), 1), within_s=10)
    entries = _entries()
    store().set("seen", "1")
    hung = [entry for entry in entries if entry["state"] != "completed"]
    assert len(hung) == 1, [(entry["profiling_name"], entry["state"]) for entry in entries]
    assert "broadcast" in hung[0]["profiling_name"].lower(), hung[0]["profiling_name"]
    from torch._C._distributed_c10d import _dump_fr_trace_json

    as_json = json.loads(_dump_fr_trace_json(backend=BACKEND))
    assert any(e["state"] != "completed" and "broadcast" in e["profiling_name"].lower() for e in as_json["entries"])


def test_dump_after_a_timeout_shows_what_hung() -> None:
    gloo_lacks("marks failed operations as completed")
    assert_clean_exits(run_fresh_processes(_timed_out, 2, env=RECORDER, group_timeout_s=2))


def _recorder_off(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(3))
    assert _entries() == []


def test_recorder_can_be_turned_off() -> None:
    assert_clean_exits(run_fresh_processes(_recorder_off, 2, env={"TORCH_FR_BUFFER_SIZE": "0"}))


def _nan_check(rank: int, world_size: int) -> None:
    bad = torch.tensor([1.0, float("nan")])
    expect_error(lambda: dist.all_reduce(bad), "nan", within_s=10)
    expect_error(lambda: dist.all_gather_into_tensor(torch.zeros(2 * world_size), bad), "nan", within_s=10)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == world_size).all()
    dist.all_reduce(torch.ones(3, dtype=torch.int32))
    dist.destroy_process_group()


def test_nan_check_raises() -> None:
    assert_clean_exits(run_fresh_processes(_nan_check, 2, env={"TORCH_DIST_NAN_CHECK": "1"}))


def _abort_hook(rank: int, world_size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.supports_abort_hooks and backend.supports_completion_hooks
    calls: list[int] = []
    backend.register_abort_hook(1, lambda: calls.append(1))
    backend.register_abort_hook(2, lambda: calls.append(2))
    backend.unregister_abort_hook(2)
    dist.barrier()
    backend.abort()
    assert calls and set(calls) == {1}, calls


def _raising_abort_hook(rank: int, world_size: int, kind: str) -> None:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        store().wait(["done"], timedelta(seconds=20))
        return

    def hook() -> None:
        raise OSError("no space left for the dump")

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.register_abort_hook(1, hook)
    if kind == "abort":
        backend.abort()
        message = expect_error(lambda: dist.all_reduce(torch.ones(3)))
    elif kind == "recv":
        message = expect_error(lambda: dist.irecv(torch.ones(3), 1).wait(), within_s=8)  # type: ignore[union-attr]
    else:
        message = expect_error(lambda: dist.all_reduce(torch.ones(1 << 20), async_op=kind == "asynchronous").wait())
    assert "no space left" not in message, message
    store().set("done", "1")


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "recv", "abort"])
def test_an_abort_hook_that_raises_hides_nothing_and_kills_nobody(kind: str) -> None:
    gloo_lacks("does not call abort hooks")
    outcomes = run_fresh_processes(_raising_abort_hook, 2, kind, group_timeout_s=2, timeout=40)
    assert_clean_exits(outcomes)
    assert "no space left for the dump" in outcomes[0].stderr


def test_abort_hooks_run() -> None:
    gloo_lacks("no abort hooks")
    assert_clean_exits(run_fresh_processes(_abort_hook, 2))


def _health(socket_path: str) -> tuple[int, str]:
    """Status and body of PyTorch's own health check, as its debug server's handler answers."""
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(socket_path)
    connection.request("POST", "/handler/c10d_health_check")
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def _unhealthy_after_timeout(rank: int, world_size: int) -> None:
    from torch._C._distributed_c10d import _WorkerServer

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/control"
        server = _WorkerServer(path)
        before = _health(path)
        if rank == 1:
            store().wait(["seen"], timedelta(seconds=30))
        else:
            expect_error(dist.barrier, within_s=10)
            end_s = time.monotonic() + 30  # hooks are called beside the error, and the first dump takes seconds
            while "horon" not in (after := _health(path))[1] and time.monotonic() < end_s:
                time.sleep(0.05)
            store().set("seen", "1")
            assert "horon" not in before[1] and "horon" in after[1], (before, after)
        server.shutdown()


def test_health_check_tells_of_a_timeout() -> None:
    gloo_lacks("has no abort hooks")
    assert_clean_exits(run_fresh_processes(_unhealthy_after_timeout, 2, group_timeout_s=2))


def _slow_hook(rank: int, world_size: int, kind: str, folder: str) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    has_error, has_begun, has_ended = (threading.Event() for _ in range(3))

    def hook() -> None:
        has_begun.set()
        assert has_error.wait(20), "the error waits for the hook"
        time.sleep(0.5)
        Path(folder, f"ended {rank}").touch()
        has_ended.set()

    backend.register_abort_hook(77, hook)
    if rank == 0:
        if kind == "recv":
            expect_error(lambda: dist.recv(torch.zeros(3), 1), within_s=10)
        elif kind == "asynchronous":
            expect_error(lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(), within_s=10)
        else:
            expect_error(lambda: dist.all_reduce(torch.ones(3)), within_s=10)
        has_error.set()
        if kind == "asynchronous":
            assert has_begun.wait(30)  # behind the flight recorder's
            backend.unregister_abort_hook(77)  # waits for it
            assert has_ended.is_set()
        store().set("over", "1")
        # Otherwise the end of the process waits for it.
    else:
        has_error.set()
        store().wait(["over"], timedelta(seconds=30))


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "recv"])
def test_errors_do_not_wait_for_abort_hooks(kind: str, tmp_path: Path) -> None:
    gloo_lacks("no abort hooks")
    assert_clean_exits(run_fresh_processes(_slow_hook, 2, kind, str(tmp_path), group_timeout_s=2, timeout=60))
    assert (tmp_path / "ended 0").exists()
