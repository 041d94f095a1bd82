"""Waits that last: who says so, and what is known of those that are waited for; horon-where."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, expect_error, gloo_lacks, on_gloo, run_fresh_processes, store
from host_groups import join

if not on_gloo():
    import horon
    import horon.torch as hvd
    import horon.where
    from horon import _C

pytestmark = pytest.mark.any_torch

_SOON = {"HORON_STALL_CHECK_TIME_SECONDS": "1"}
_LATE_S = 4  # long enough for a report on a machine that is busy
_REPORT = re.compile(r"has waited \d+ s for ")


def _loads_a_batch() -> None:
    time.sleep(_LATE_S)


def _computes() -> None:
    end = time.monotonic() + _LATE_S
    while time.monotonic() < end:
        pass


def _keeps_the_lock() -> None:
    ctypes.PyDLL(None).sleep(_LATE_S)


def _stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _late_in_a_collective(rank: int, world_size: int, late: Callable[[], None]) -> None:
    store().set(f"pid{rank}", str(os.getpid()))
    dist.barrier()
    if rank == world_size - 1:
        late()
    elif late is _stops and rank == 0:
        pid = int(store().get(f"pid{world_size - 1}"))
        threading.Timer(_LATE_S, os.kill, (pid, signal.SIGCONT)).start()
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    assert tensor[0] == sum(range(world_size))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (_loads_a_batch, ["is in no call of horon that has waited for a second", "_loads_a_batch ("]),
        (_computes, ["_computes ("]),
        (_keeps_the_lock, ["has kept the global interpreter lock"]),
        (_stops, ["is stopped (SIGSTOP"]),
    ],
)
def test_who_is_late_and_where(late: Callable[[], None], words: list[str]) -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_in_a_collective, 2, late, env=_SOON)
    assert_clean_exits(outcomes)
    text = outcomes[0].stderr
    for word in ("all_reduce #1 on rank 0 (all_reduce(float32, 4 elements, SUM)) has waited ", "rank 1 (pid ", *words):
        assert word in text, text
    assert "goes on after" in text
    assert not _REPORT.search(outcomes[1].stderr)


def test_only_the_first_of_those_that_wait_reports() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_in_a_collective, 3, _loads_a_batch, env=_SOON)
    assert_clean_exits(outcomes)
    assert "for rank 2 (pid " in outcomes[0].stderr
    assert not _REPORT.search(outcomes[1].stderr + outcomes[2].stderr)


def test_nothing_is_said_when_nobody_is_late() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_in_a_collective, 2, _nothing, env=_SOON)
    assert_clean_exits(outcomes)
    assert [outcome.stderr for outcome in outcomes] == ["", ""]


def _nothing() -> None:
    pass


@pytest.mark.parametrize("variable", ["HORON_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"])
def test_reports_can_be_turned_off(variable: str) -> None:
    gloo_lacks("has no such option")
    outcomes = run_fresh_processes(_late_in_a_collective, 2, _loads_a_batch, env={variable: "0"})
    assert_clean_exits(outcomes)
    assert outcomes[0].stderr == ""


def test_a_process_that_may_not_be_asked_is_named_all_the_same() -> None:
    gloo_lacks("has no such option")
    outcomes = run_fresh_processes(_late_in_a_collective, 2, _loads_a_batch, env={**_SOON, "HORON_WATCH": "off"})
    assert_clean_exits(outcomes)
    assert "for rank 1 (pid " in outcomes[0].stderr
    assert "_loads_a_batch" not in outcomes[0].stderr


def _makes_a_group(rank: int, world_size: int) -> str:
    return expect_error(lambda: dist.init_process_group("horon", store=dist.HashStore(), rank=0, world_size=1))


@pytest.mark.parametrize(
    ("variable", "value"), [("HORON_STALL_CHECK_TIME_SECONDS", "soon"), ("HORON_WATCH", "sometimes")]
)
def test_a_setting_that_makes_no_sense_is_an_error(variable: str, value: str) -> None:
    gloo_lacks("has no such option")
    outcome = run_fresh_processes(_makes_a_group, 1, env={variable: value}, init=False)[0]
    assert_clean_exits([outcome])
    assert variable in outcome.result and value in outcome.result


def _late_in_a_message(rank: int, world_size: int) -> None:
    tensor = torch.ones(4)
    if rank == 1:
        _loads_a_batch()
        dist.send(tensor, 0)
    else:
        dist.recv(tensor, 1)
    dist.destroy_process_group()


def test_who_is_late_with_a_message() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_in_a_message, 2, env=_SOON)
    assert_clean_exits(outcomes)
    for word in ("rank 0: recv of 16 bytes from rank 1, tag 0 has waited", "_loads_a_batch ("):
        assert word in outcomes[0].stderr, outcomes[0].stderr


def _late_with_one_of_two_messages(rank: int, world_size: int) -> None:
    tensor = torch.ones(4)
    if rank == 0:
        other = dist.irecv(torch.empty(4), 2)
        dist.recv(tensor, 1)
        dist.barrier()
        other.wait()
        return
    if rank == 1:
        _loads_a_batch()
        dist.send(tensor, 0)
    dist.barrier()
    if rank == 2:
        dist.send(tensor, 0)


def test_only_the_message_that_is_waited_for_is_named() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_with_one_of_two_messages, 3, env=_SOON)
    assert_clean_exits(outcomes)
    reports = [line for line in outcomes[0].stderr.splitlines() if "rank 0: recv" in line]
    assert len(reports) > 1 and "goes on" in reports[-1], outcomes[0].stderr
    assert all("from rank 1" in line and "rank 2" not in line for line in reports), outcomes[0].stderr


def _message_times_out(rank: int, world_size: int) -> None:
    if rank == 0:
        expect_error(lambda: dist.recv(torch.ones(4), 1), "Timed out waiting", "rank 1")
        store().set("over", "1")
    else:
        store().wait(["over"], timedelta(seconds=30))


def test_a_message_that_times_out_does_not_go_on() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_message_times_out, 2, env=_SOON, group_timeout_s=_LATE_S)
    assert_clean_exits(outcomes)
    assert _REPORT.search(outcomes[0].stderr)
    assert "goes on" not in outcomes[0].stderr


def _blocks_a_signal(rank: int, world_size: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.2)
    assert signal.sigwait([signal.SIGUSR1]) == signal.SIGUSR1


def test_signals_that_the_program_has_blocked_wait_for_it() -> None:
    assert_clean_exits(run_fresh_processes(_blocks_a_signal, 1))


def _late_in_an_asynchronous_operation(rank: int, world_size: int) -> None:
    if rank == 1:
        _loads_a_batch()
    large, small = torch.ones(1 << 20), torch.ones(4)
    works = [dist.all_reduce(large, async_op=True), dist.all_reduce(small, async_op=True)]
    for work in works:
        work.wait()
    dist.destroy_process_group()


def test_who_is_late_with_an_asynchronous_operation() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_in_an_asynchronous_operation, 2, env=_SOON)
    assert_clean_exits(outcomes)
    assert "(all_reduce(float32, 1048576 elements, SUM)) has waited" in outcomes[0].stderr


def _late_with_a_name(rank: int, world_size: int) -> None:
    hvd.init()
    if rank == 1:
        _loads_a_batch()
    hvd.allreduce(torch.ones(4), name="a.gradient")
    hvd.shutdown()


def test_who_is_late_with_a_named_operation() -> None:
    gloo_lacks("has no named operations")
    outcomes = run_fresh_processes(_late_with_a_name, 2, env=_SOON)
    assert_clean_exits(outcomes)
    for word in ("a.gradient", "missing: rank 1", "rank 1 (pid ", "_loads_a_batch ("):
        assert word in outcomes[0].stderr, outcomes[0].stderr


def _wait_for_each_other(rank: int, world_size: int) -> None:
    other = dist.new_group(timeout=timedelta(seconds=_LATE_S))
    expect_error(dist.barrier if rank == 0 else lambda: dist.barrier(other), "DistBackendError")


def test_two_that_wait_for_each_other_are_told() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_wait_for_each_other, 2, env=_SOON, group_timeout_s=_LATE_S)
    assert_clean_exits(outcomes)
    for outcome in outcomes:
        assert "So it waits for this process" in outcome.stderr, outcome.stderr


def _times_out(rank: int, world_size: int) -> None:
    if rank == 0:
        expect_error(dist.barrier, "Timed out waiting", "rank 1")
        store().set("over", "1")
    else:
        store().wait(["over"], timedelta(seconds=30))


def test_a_report_comes_before_time_is_up() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_times_out, 2, group_timeout_s=_LATE_S)  # with the default of 60 s for reports
    assert_clean_exits(outcomes)
    text = outcomes[0].stderr
    assert len(_REPORT.findall(text)) == 1 and "_times_out (" in text, text
    assert "goes on" not in text


def _comes_late(rank: int, world_size: int, path: str) -> None:
    if rank == 1:
        time.sleep(2 * _LATE_S)
    dist.init_process_group("horon", init_method=f"file://{path}", rank=rank, world_size=world_size)
    dist.destroy_process_group()


def test_who_has_not_come_to_make_a_group(tmp_path: Path) -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_comes_late, 3, str(tmp_path / "store"), env=_SOON, init=False)
    assert_clean_exits(outcomes)
    assert "rank 0, making a group of 3 ranks" in outcomes[0].stderr
    assert "s for rank 1." in outcomes[0].stderr
    assert not _REPORT.search(outcomes[1].stderr + outcomes[2].stderr)


def _late_on_another_host(rank: int, world_size: int, path: str, hosts: list[int], call: str) -> None:
    join(rank, hosts, path)
    signals = store()
    if rank == world_size - 1:
        _loads_a_batch()
        if world_size > 3:
            _loads_a_batch()  # that rank 2 waits, too, is to be seen a second later
    if call == "barrier":
        dist.barrier()
    elif call == "large":
        dist.all_reduce(torch.ones(1 << 20))
    elif rank == world_size - 1:
        dist.send(torch.ones(4), 0)
    elif rank == 0:
        dist.recv(torch.ones(4), world_size - 1)
    signals.set(f"done/{rank}", "")
    signals.wait([f"done/{other}" for other in range(world_size)])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "call"),
    [
        ([0, 1], "message"),
        ([0, 1, 2], "large"),
        ([0, 0, 1, 1], "barrier"),
        ([0, 0, 1, 1], "large"),
        ([0, 0, 1, 1], "message"),
    ],
)
def test_who_is_late_on_another_host_and_where(hosts: list[int], call: str, tmp_path: Path) -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(
        _late_on_another_host, len(hosts), str(tmp_path / "store"), hosts, call, env=_SOON, init=False
    )
    assert_clean_exits(outcomes)
    text = outcomes[0].stderr
    what = {
        "barrier": "barrier #0 on rank 0 (barrier())",
        "large": "all_reduce #0 on rank 0 (all_reduce(float32, 1048576 elements, SUM))",
        "message": f"rank 0: recv of 16 bytes from rank {len(hosts) - 1}, tag 0",
    }[call]
    assert what + " has waited" in text, text
    # Rank 0 of four waits for rank 2, and that one for rank 3.
    assert f"rank {len(hosts) - 1} (pid " in text and "_loads_a_batch (" in text, text
    assert "So it waits for this process" not in text, text


def test_a_process_on_another_host_that_may_not_be_asked_is_named_all_the_same(tmp_path: Path) -> None:
    gloo_lacks("has no such option")
    env = {**_SOON, "HORON_WATCH": "off"}
    outcomes = run_fresh_processes(
        _late_on_another_host, 2, str(tmp_path / "store"), [0, 1], "barrier", env=env, init=False
    )
    assert_clean_exits(outcomes)
    assert "s for rank 1 (pid " in outcomes[0].stderr and "_loads_a_batch" not in outcomes[0].stderr


def _stopped_on_another_host(rank: int, world_size: int, path: str) -> None:
    join(rank, [0, 1], path)
    if rank == 0:
        stopped = psutil.Process(int(store().get("pid")))
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        threading.Timer(2 * _LATE_S, stopped.send_signal, (signal.SIGCONT,)).start()
    else:
        store().set("pid", str(os.getpid()))
        # By itself, before the barrier: whoever is stopped while it reads the store keeps the others out of it.
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    dist.destroy_process_group()


def test_who_is_stopped_on_another_host(tmp_path: Path) -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_stopped_on_another_host, 2, str(tmp_path / "store"), env=_SOON, init=False)
    assert_clean_exits(outcomes)
    text = outcomes[0].stderr
    assert "did not answer when it was asked where it is: it may be stopped, or get no CPU time" in text, text


def _wait_for_each_other_between_hosts(rank: int, world_size: int, path: str) -> None:
    join(rank, [0, 1], path, timeout_s=_LATE_S + 2)
    other = dist.new_group(timeout=timedelta(seconds=_LATE_S + 2))
    expect_error(dist.barrier if rank == 0 else lambda: dist.barrier(other), "DistBackendError")


def test_two_that_wait_for_each_other_between_hosts_are_told(tmp_path: Path) -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(
        _wait_for_each_other_between_hosts, 2, str(tmp_path / "store"), env=_SOON, init=False
    )
    assert_clean_exits(outcomes)
    assert any("So it waits for this process" in outcome.stderr for outcome in outcomes), outcomes


def _late_for_one_that_is_waited_for(rank: int, world_size: int) -> None:
    if rank == 3:
        _loads_a_batch()
        _loads_a_batch()
    if rank < 3:
        dist.recv(torch.ones(4), rank + 1)
    if rank > 0:
        dist.send(torch.ones(4), rank - 1)
    dist.barrier()
    dist.destroy_process_group()


def test_those_are_asked_for_whom_the_late_rank_waits() -> None:
    gloo_lacks("says nothing")
    outcomes = run_fresh_processes(_late_for_one_that_is_waited_for, 4, env=_SOON)
    assert_clean_exits(outcomes)
    text = outcomes[0].stderr
    for word in (
        "rank 1 (pid ",
        "waits in rank 1: recv of 16 bytes from rank 2, tag 0",
        "waits in rank 2: recv of 16 bytes from rank 3, tag 0",
        "_loads_a_batch (",
    ):
        assert word in text, text


def _late_with_a_name_on_another_host(rank: int, world_size: int) -> None:
    os.environ["HORON_HOST_ID"] = f"host{rank}"
    hvd.init()
    if rank == 1:
        _loads_a_batch()
    hvd.allreduce(torch.ones(4), name="a.gradient")
    hvd.shutdown()


def test_who_is_late_with_a_named_operation_on_another_host() -> None:
    gloo_lacks("has no named operations")
    outcomes = run_fresh_processes(_late_with_a_name_on_another_host, 2, env=_SOON)
    assert_clean_exits(outcomes)
    for word in ("a.gradient", "missing: rank 1", "rank 1 (pid ", "_loads_a_batch ("):
        assert word in outcomes[0].stderr, outcomes[0].stderr


def _asked_by_hand(rank: int, world_size: int) -> None:
    store().set(f"pid{rank}", str(os.getpid()))
    if rank == 1:
        dist.barrier()
        return
    pid = store().get("pid1").decode()
    deadline = time.monotonic() + 30
    text = ""
    while "waits in barrier" not in text and time.monotonic() < deadline:  # it has to wait for a second first
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert horon.where.main([pid]) == 0
        text = out.getvalue()
    for word in (
        f"pid {pid}",
        f"waits in barrier #0 on rank 1 (barrier()), for rank 0 (pid {os.getpid()})",
        "barrier (",
    ):
        assert word in text, text
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert horon.where.main(["1"]) == 1
    assert "no process" in err.getvalue()
    dist.barrier()


def test_horon_where() -> None:
    gloo_lacks("can not be asked")
    assert_clean_exits(run_fresh_processes(_asked_by_hand, 2))


def _asked_until_the_end(rank: int, world_size: int) -> None:
    if rank == 1:
        store().set("ready", "1")
        time.sleep(1)
        return  # and the process ends, with whatever it is asked just then
    store().wait(["ready"])
    pid = None
    posts = _C.find_watch_posts()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for post in posts:
            answer = _C.ask_watch_post(post, timedelta(seconds=1))
            pid = answer[0] if answer else pid
    assert pid is not None


def test_a_process_may_end_while_it_is_asked() -> None:
    gloo_lacks("can not be asked")
    for outcomes in [run_fresh_processes(_asked_until_the_end, 2) for _ in range(3)]:
        assert_clean_exits(outcomes)
        assert [outcome.stderr for outcome in outcomes] == ["", ""]
