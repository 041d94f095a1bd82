"""horonrun and horon.run: what is started, with which variables, and what becomes of ranks that fail."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import on_gloo

pytestmark = [pytest.mark.any_torch, pytest.mark.skipif(on_gloo(), reason="horon's own")]

TIMEOUT_S = 100


# ---- what is asked for ----


def test_hosts() -> None:
    from horon.runner._hosts import Host, parse_hostfile, parse_hosts

    assert parse_hosts("a:2, b:4,c") == [Host("a", 2), Host("b", 4), Host("c", 1)]
    assert parse_hosts("[fe80::1%eth0]:2,[::1]") == [Host("fe80::1%eth0", 2), Host("::1", 1)]
    assert parse_hosts("me@a:2,me@[::1]:3") == [Host("me@a", 2), Host("me@::1", 3)]
    assert parse_hostfile("# ours\na slots=2\n\nb:3  # theirs\nc\nd\tslots=4") == [
        *[Host("a", 2), Host("b", 3), Host("c", 1), Host("d", 4)]
    ]


@pytest.mark.parametrize("text", ["", "a:", "a:x", ":2", "a:0", "a:2,,b:2"])
def test_hosts_that_are_none(text: str) -> None:
    from horon.runner._hosts import parse_hostfile, parse_hosts

    with pytest.raises(ValueError, match="expected <name>:<number of processes>, got"):
        parse_hosts(text)
    with pytest.raises(ValueError, match=r"expected <name>:<number of processes>, got|names no host"):
        parse_hostfile(text)


def test_a_command_line() -> None:
    from horon.runner.launch import plan

    line = "-np 4 -H localhost:4 --fusion-threshold-mb 32 --timeline-filename t.json --timeline-mark-cycles"
    line += " --no-stall-check --gloo --min-np 2 --elastic-timeout 30 python -u train.py --lr 0.1 -np 7"
    job = plan(line.split())
    assert job.num_proc == 4
    assert job.command == ["python", "-u", "train.py", "--lr", "0.1", "-np", "7"]
    assert job.environment == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 1024 * 1024),
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_ELASTIC_TIMEOUT": "30",
        "HORON_ELASTIC_MIN_NP": "2",
        "HORON_RUN_MIN_NP": "2",
    }


def test_two_hyphens_end_the_options() -> None:
    from horon.runner.launch import plan

    assert plan(["-np", "2", "--", "python", "a.py", "--", "b"]).command == ["python", "a.py", "--", "b"]


def test_options_that_take_others_back_and_options_without_a_meaning() -> None:
    from horon.runner.launch import plan

    line = "-np 1 --autotune --no-stall-check --no-autotune --stall-check --autotune-log-file x --torus-allreduce"
    line += " --log-level INFO --log-hide-timestamp --no-hierarchical-allgather train --no-stall-check"
    job = plan(line.split())
    assert job.environment == {"HOROVOD_LOG_LEVEL": "INFO"}
    assert job.command == ["train", "--no-stall-check"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("-np 2", "expected a command to start"),
        ("python train.py", "-np"),
        ("-np 0 true", "expected a positive number of processes, got 0"),
        ("-np 2 --mpi true", "start the script itself with mpirun"),
        ("-np 2 --reset-limit 3 true", "-np and --min-np say how many ranks may be lost"),
        ("-np 2 --host-discovery-script x true", "no hosts are added while a job runs"),
        ("-np 2 --config-file c.yaml true", "config_file='c.yaml' is not supported: give its settings as options"),
        ("-np 2 --jsrun true", "start the script itself with mpirun"),
        ("-np 2 --min-np 0 true", "expected a least number of processes of 1 or more, got 0"),
        ("-np 2 --elastic-timeout 0 true", "expected a whole number"),
        ("-np 2 --elastic-timeout x true", "expected a whole number, got 'x'"),
        ("-np 2 --min-np 3 true", "2 processes are not from 3 to any number"),
        ("-np 2 -H localhost:1 true", "the hosts have 1 slots"),
        ("-np 3 -H far.example:2 true", "the hosts have 2 slots"),
        ("-np 2 -p x true", "-p/--ssh-port: invalid int value"),
        ("-np 2 --hostfile /nowhere true", "No such file"),
        ("-np 2 --fusion-threshold-mb much true", "expected a whole number, got 'much'"),
    ],
)
def test_command_lines_that_are_refused(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    from horon.runner.launch import plan

    with pytest.raises(SystemExit) as error:
        plan(line.split())
    assert error.value.code == 2
    assert complaint in capsys.readouterr().err


def test_variables_of_a_process() -> None:
    from horon.runner._child import horovod_variables
    from horon.runner._outputs import folder_of
    from horon.runner._processes import threads_for

    torchruns = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    found = horovod_variables({**torchruns, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"})
    assert [found[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")] == ["3", "4", "3", "4"]
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert folder_of("out", 3, 16) == Path("out/rank.03")
    assert [threads_for(16, n) for n in (1, 4, 5, 16, 100)] == [16, 4, 3, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_proc": 0}, "expected a positive number of processes, got 0"),
        ({"use_mpi": True}, "start the script itself with mpirun"),
        ({"slots": 2}, "no hosts are added while a job runs"),
        ({"hosts": "localhost:1", "hostfile": "hosts"}, "got both"),
        ({"num_proc": 2, "hosts": "localhost:1"}, "the hosts have 1 slots"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    import horon

    with pytest.raises(ValueError, match=complaint):
        horon.run(print, **arguments)


# ---- what is started ----


def _sum_of_ranks(base: float, *, times: int) -> tuple[int, int, float]:
    import horon.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([base + hvd.rank()]), op=hvd.Sum, name="sum")
    return hvd.rank(), hvd.size(), float(total) * times


def test_run_returns_what_the_ranks_returned() -> None:
    import horon

    assert horon.run(_sum_of_ranks, (1.0,), {"times": 2}, num_proc=2) == [(0, 2, 6.0), (1, 2, 6.0)]


def test_run_takes_closures() -> None:
    import horon

    base = [7]
    with pytest.deprecated_call():
        assert horon.run(lambda: base[0] + int(os.environ["HOROVOD_RANK"]), np=3) == [7, 8, 9]
    assert "HOROVOD_RANK" not in os.environ


# Rank 0 may have raised because of it, or was ended.
RANK_1_FAILED = r"^horon\.run: (the others were ended when )?rank 1 ended with 1\."


def _fails(rank: int) -> None:
    import horon.torch as hvd
    import torch

    hvd.init()
    if hvd.rank() == rank:
        raise LookupError("there is no such thing")
    hvd.allreduce(torch.ones(4), name="never")


def test_run_says_who_has_failed_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import horon

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match=RANK_1_FAILED) as error:
        horon.run(_fails, (1,), num_proc=2)
    assert "there is no such thing" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def _exits_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        sys.exit(0)


def test_run_names_a_rank_that_exits_instead_of_returning() -> None:
    import horon

    with pytest.raises(RuntimeError, match="rank 1 has exited with 0 instead of returning"):
        horon.run(_exits_on_rank_1, num_proc=2)


def _fails_and_takes_long_to_exit() -> None:
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, TIMEOUT_S)  # comes after hvd.shutdown
    _fails(1)


def test_run_says_why_though_others_have_ended_before() -> None:
    import horon

    with pytest.raises(RuntimeError, match=RANK_1_FAILED) as error:
        horon.run(_fails_and_takes_long_to_exit, num_proc=2)
    assert "there is no such thing" in str(error.value)


def test_causes_before_consequences() -> None:
    from types import SimpleNamespace

    from horon.runner._failures import failures_of

    def failure(status: int, timestamp: int, traceback: str | None) -> SimpleNamespace:
        message = {"message": "?", "extraInfo": {"py_callstack": traceback}} if traceback else "no traceback"
        return SimpleNamespace(exitcode=status, timestamp=timestamp, message=message)

    lost = "Traceback:\n  ...\nhoron._C.HorovodInternalError: rank 2 has shut down\n"
    raised_and_ended_while_exiting = failure(-signal.SIGTERM, 6, "KeyError: 1")
    error = SimpleNamespace(
        failures={
            0: failure(1, 5, lost),
            1: failure(-9, 7, None),
            2: raised_and_ended_while_exiting,
            3: failure(-signal.SIGTERM, 8, None),
        }
    )
    found = failures_of(error)
    assert [str(one) for one in found] == [
        "rank 2 ended with 1",
        "rank 1 was ended by signal 9",
        "rank 0 ended with 1",
    ]
    assert [one.text for one in found] == ["KeyError: 1", "", lost]


def test_ranks_that_the_agent_has_ended_are_no_causes() -> None:
    from types import SimpleNamespace

    from horon.runner._failures import failures_of

    def said(*failures: tuple[int, int, int]) -> list[str]:
        found = {rank: SimpleNamespace(exitcode=status, timestamp=time, message="") for rank, status, time in failures}
        return [str(failure) for failure in failures_of(SimpleNamespace(failures=found))]

    assert said((1, 3, 5), (0, -15, 5), (2, -15, 5)) == ["rank 1 ended with 3"]
    assert said((1, 3, 5), (0, -9, 5), (2, 1, 5)) == [
        "rank 1 ended with 3",
        "rank 0 was ended by signal 9",
        "rank 2 ended with 1",
    ]
    somebody_else_has_ended_it = said((2, 1, 6), (1, -15, 5), (0, -15, 6))
    assert somebody_else_has_ended_it == ["rank 1 was ended by signal 15", "rank 2 ended with 1"]


SCRIPT = """
import os, sys, time
import torch
import horon.torch as hvd

hvd.init()
assert str(hvd.rank()) == os.environ["HOROVOD_RANK"] == os.environ["RANK"]
assert str(hvd.size()) == os.environ["HOROVOD_SIZE"]
total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="sum").tolist()
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {total}\\n")  # in one piece
sys.stdout.flush()
if sys.argv[1:] == ["fail"] and hvd.rank() == 1:
    sys.exit(3)
if sys.argv[1:] == ["kill"] and hvd.rank() == 1:
    os.kill(os.getpid(), 9)
if sys.argv[1:]:
    time.sleep(1000)
"""


def _start(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "horon.runner.launch", "-np", "2", *options]
    command += [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        return process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), *children, process]:
            one.kill()
        raise


def test_horonrun(tmp_path: Path) -> None:
    process = _start(tmp_path, options=("--verbose", "-H", "localhost:2"))
    out, err = _finish(process)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"rank {rank} of 2: [2.0, 2.0, 2.0]" for rank in (0, 1)]
    assert "(in 2 processes)" in err
    assert "Warning" not in err
    assert "failed to bind" not in err


@pytest.mark.parametrize(
    ("how", "status", "said"), [("fail", 3, "ended with 3"), ("kill", 137, "was ended by signal 9")]
)
def test_horonrun_ends_all_when_one_fails(tmp_path: Path, how: str, status: int, said: str) -> None:
    process = _start(tmp_path, how)
    _, err = _finish(process)
    assert process.returncode == status, err
    assert f"horonrun: rank 1 {said}; the others were ended\n" in err


def test_horonrun_ends_all_at_ctrl_c(tmp_path: Path) -> None:
    process = _start(tmp_path, "sleep")
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("rank")
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.send_signal(signal.SIGINT)
    _finish(process)
    assert process.returncode == 128 + signal.SIGINT
    deadline = time.monotonic() + TIMEOUT_S
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "a rank has outlived horonrun"
        time.sleep(0.05)


def test_the_example(tmp_path: Path) -> None:
    for needed in ("sklearn", "tqdm"):
        pytest.importorskip(needed)
    script = Path(__file__).resolve().parents[2] / "examples" / "digits_horovod.py"
    command = [sys.executable, "-m", "horon.runner.launch", "-np", "2", sys.executable, str(script)]
    with subprocess.Popen(
        [*command, "--epochs", "2", "--losses-json", "losses.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = _finish(process)
    assert process.returncode == 0, err
    accuracy = re.search(r"held-out accuracy: ([\d.]+)% of", out)
    assert accuracy is not None, out
    assert float(accuracy[1]) > 75
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoints" / "digits_horovod.pt").exists()


def test_horonrun_says_what_it_has() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "horon.runner.launch", "--check-build"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert found.returncode == 0, found.stderr
    assert "[X] PyTorch" in found.stdout
    assert "[X] Gloo" in found.stdout


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "horon.runner.launch", "-np", "1", "./nowhere"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert found.returncode == 1
    assert "horonrun: ./nowhere: No such file or directory" in found.stderr
