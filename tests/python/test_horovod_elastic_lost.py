"""Elastic training that loses ranks: hvd.elastic.run under horonrun --min-np."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import assert_clean_exits, on_gloo, run_fresh_processes
from test_horovod_run_hosts import path_with_ssh  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.any_torch, pytest.mark.skipif(on_gloo(), reason="horon's own")]

_TIMEOUT_S = 120
_KILLED = -signal.SIGKILL

Plan = list[tuple[int, str, int]]
"""At which batch, by what, which rank of the job."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(plan: Plan) -> tuple[int, int, list[float], list[str]]:
    """Returns rank and size at the end, the model's weights, and how often it began: as whom, of how many, where."""
    import horon.torch
    import horon.torch as hvd

    hvd.init()
    me = int(os.environ["HOROVOD_RANK"])
    torch.manual_seed(me)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0)
    sizes: list[int] = []
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
    starts = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        starts.append(f"{hvd.rank()} of {hvd.size()} at {state.batch}, {len(sampler)} samples")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
        while state.batch < 12:
            for at, how, who in plan:
                if at == state.batch and who == me:
                    if how == "kill":
                        _die()
                    if how == "exit":
                        os._exit(7)
                    if how == "kill in reset":
                        horon.torch.elastic.init = _die
                    if how == "raise":
                        raise ValueError("a bug of its own")
                    if how == "disagree" and not sizes:
                        hvd.allreduce(torch.ones(2 + hvd.rank()), name="disagree")
            optimizer.zero_grad()
            (model(torch.ones(2, 4) * (1 + hvd.rank())) - 3).square().mean().backward()
            optimizer.step()
            state.batch += 1
            state.commit()

    loop(state)
    found = hvd.rank(), hvd.size(), model.weight.detach().flatten().tolist(), starts
    hvd.shutdown()
    hvd.init()  # of those who are left
    assert hvd.size() == (sizes[-1] if sizes else int(os.environ["HOROVOD_SIZE"]))
    hvd.shutdown()
    return found


def _rank(rank: int, size: int, path: str, plan: Plan) -> tuple[int, int, list[float], list[str]]:
    from horon.common._context import default_context

    os.environ.update({"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)})
    default_context._job_store = dist.FileStore(path, size)  # as horonrun's, in nobody who dies
    return train(plan)


@pytest.mark.parametrize(
    ("size", "plan", "left"),
    [
        (3, [(5, "kill", 1)], [0, 2]),
        (3, [(5, "kill", 0)], [1, 2]),
        (2, [(0, "exit", 0)], [1]),
        (4, [(3, "kill", 0), (8, "kill", 3)], [1, 2]),
        (4, [(4, "kill", 1), (4, "kill", 2)], [0, 3]),
        (4, [(4, "kill", 1), (0, "kill in reset", 2)], [0, 3]),
        (3, [*[(2, "disagree", rank) for rank in range(3)], (6, "kill", 0)], [1, 2]),
    ],
)
def test_the_others_go_on(tmp_path: Path, size: int, plan: Plan, left: list[int]) -> None:
    env = {"HORON_ELASTIC_MIN_NP": str(len(left))}
    outcomes = run_fresh_processes(_rank, size, f"{tmp_path}/store", plan, init=False, env=env)
    ends = {who: 7 if how == "exit" else _KILLED for _, how, who in plan if how != "disagree"}
    assert_clean_exits(outcomes, [ends.get(rank, 0) for rank in range(size)])
    found = [outcomes[rank].result for rank in left]
    assert [(rank, n) for rank, n, *_ in found] == [(rank, len(left)) for rank in range(len(left))]
    assert all(weights == found[0][2] for _, _, weights, _ in found)


def test_it_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    env = {"HORON_ELASTIC_MIN_NP": "1"}
    outcomes = run_fresh_processes(_rank, 3, f"{tmp_path}/store", [(5, "kill", 2)], init=False, env=env)
    assert_clean_exits(outcomes, [0, 0, _KILLED])
    for rank in (0, 1):
        assert outcomes[rank].result[3] == [f"{rank} of 3 at 0, 8 samples", f"{rank} of 2 at 5, 12 samples"]


def _too_late(rank: int, size: int, path: str) -> None:
    """One is stopped for longer than the others wait."""
    import horon.torch as hvd
    from horon.common._context import default_context

    os.environ.update({"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)})
    meeting = default_context._job_store = dist.FileStore(path, size)
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)

    @hvd.elastic.run
    def loop(state: Any) -> int:
        if hvd.size() == size:
            if rank == 1:
                meeting.wait(["gone on"])
            raise hvd.mpi_ops.HorovodInternalError("somebody has seen a reason")
        meeting.set("gone on", "")
        return hvd.size()

    if rank == 1:
        with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] of the job have gone on without rank 1"):
            loop(state)
        os._exit(0)
    assert loop(state) == 2
    hvd.shutdown()


def test_who_comes_too_late_is_told(tmp_path: Path) -> None:
    env = {"HORON_ELASTIC_MIN_NP": "2", "HOROVOD_ELASTIC_TIMEOUT": "1"}
    assert_clean_exits(run_fresh_processes(_too_late, 3, f"{tmp_path}/store", init=False, env=env))


def _one_waits_elsewhere(rank: int, size: int, path: str) -> None:
    """Two disagree in a process set of their own, while the third waits in an operation of all."""
    import horon.torch as hvd
    from horon.common._context import default_context

    os.environ.update({"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)})
    default_context._job_store = dist.FileStore(path, size)
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
    starts: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        starts.append(hvd.size())
        if len(starts) == 1:
            two = hvd.add_process_set([0, 1])
            if rank < 2:
                hvd.allreduce(torch.ones(2 + rank), name="disagree", process_set=two)
        assert hvd.allreduce(torch.ones(1), name="all", op=hvd.Sum) == size

    loop(state)
    assert starts == [size, size]
    hvd.shutdown()


@pytest.mark.parametrize("least", ["", "2"])
def test_who_waits_elsewhere_comes_too(tmp_path: Path, least: str) -> None:
    env = {"HORON_ELASTIC_MIN_NP": least}
    assert_clean_exits(run_fresh_processes(_one_waits_elsewhere, 3, f"{tmp_path}/store", init=False, env=env))


def _is_replaced(rank: int, size: int, path: str) -> None:
    """Rank 1 ends, and a new process is rank 1 then."""
    import horon.torch as hvd
    from horon.common._context import default_context

    os.environ.update({"HOROVOD_RANK": str(min(rank, 1)), "HOROVOD_SIZE": "2"})
    meeting = default_context._job_store = dist.FileStore(path, 2)
    if rank == 2:
        meeting.wait(["ended"])
    for time_ in range(2):
        if rank == 2 and time_ == 0:
            continue
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="sum") == 2
        hvd.shutdown()
        if rank == 1:
            meeting.set("ended", "")
            return
    assert default_context._witness is None


def test_without_min_np_a_new_process_takes_the_place_of_one_that_ended(tmp_path: Path) -> None:
    assert_clean_exits(run_fresh_processes(_is_replaced, 3, f"{tmp_path}/store", init=False))


def _all_given(rank: int, size: int, path: str) -> None:
    import horon.torch as hvd
    from horon.common._context import default_context

    os.environ.update({"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)})
    default_context._job_store = dist.FileStore(path, size)
    hvd.init([])  # Horovod's default: all
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)

    @hvd.elastic.run
    def loop(state: Any) -> int:
        if rank == 1:
            _die()
        hvd.allreduce(torch.ones(1), name="all")
        return hvd.size()

    assert loop(state) == 2


def test_an_empty_list_of_ranks_is_all(tmp_path: Path) -> None:
    env = {"HORON_ELASTIC_MIN_NP": "2"}
    outcomes = run_fresh_processes(_all_given, 3, f"{tmp_path}/store", init=False, env=env)
    assert_clean_exits(outcomes, [0, _KILLED, 0])


# ---- by the launcher ----

_SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from test_horovod_elastic_lost import train

rank, size, weights, starts = train(json.loads(sys.argv[1]))
print(f"done {os.environ['HOROVOD_RANK']} as {rank} of {size}\\n", end="", flush=True)
"""


def _run(
    folder: Path, n_ranks: int, plan: Plan, *options: str, script: str = _SCRIPT, last: Sequence[str] = (), **env: str
) -> tuple[int, list[str], str]:
    """Exit status, what ranks that were done have printed, stderr. The launcher's pid is in a file meanwhile."""
    file = folder / "train.py"
    file.write_text(script)
    command = [sys.executable, "-m", "horon.runner.launch", "-np", str(n_ranks), *options, sys.executable, str(file)]
    process = subprocess.Popen(
        [*command, json.dumps(plan), str(Path(__file__).parent), *last],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    (folder / "pid").write_text(str(process.pid))
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        raise
    return process.returncode, sorted(line for line in out.splitlines() if line.startswith("done")), err


def test_horonrun_goes_on(tmp_path: Path) -> None:
    status, done, err = _run(tmp_path, 4, [(3, "kill", 0), (8, "kill", 3)], "--min-np", "2")
    assert status == 0, err
    assert done == ["done 1 as 0 of 2", "done 2 as 1 of 2"]
    for rank in (0, 3):  # a slow one may be counted last
        words = rf"^horonrun: rank {rank} was ended by signal 9; [23] of 4 ranks are left, .* 2: the others go on$"
        assert re.search(words, err, re.MULTILINE), err


def test_horonrun_goes_on_over_hosts(tmp_path: Path, path_with_ssh: str) -> None:  # noqa: F811  (the fixture)
    options = ("--min-np", "2", "-H", "localhost:2,far:2")
    status, done, err = _run(tmp_path, 4, [(5, "kill", 0)], *options, PATH=path_with_ssh)
    assert status == 0, err
    assert done == ["done 1 as 0 of 3", "done 2 as 1 of 3", "done 3 as 2 of 3"]


def test_horonrun_ends_when_too_few_are_left(tmp_path: Path) -> None:
    status, done, err = _run(tmp_path, 3, [(3, "kill", 1), (7, "kill", 2)], "--min-np", "2")
    assert status != 0 and not done
    assert "2 of 3 ranks are left, and --min-np is 2: the others go on" in err
    assert "1 of 3 ranks are left, and --min-np is 2: too few" in err


_EARLY = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(5)
import horon.torch as hvd
hvd.init()
"""


def test_who_ends_before_all_have_met_can_not_be_spared(tmp_path: Path) -> None:
    status, _, err = _run(tmp_path, 3, [], "--min-np", "2", script=_EARLY)
    assert status == 5
    assert "horonrun: rank 1 ended with 5 before all had met" in err


_TOLD = """
import os, signal, sys, time
import torch.distributed as dist
seen = []
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
    signal.signal(one, lambda number, frame: seen.append(number))
dist.init_process_group("horon")
if os.environ["RANK"] == "0":
    os.kill(int(open(sys.argv[3]).read()), int(sys.argv[4]))
end = time.monotonic() + 20
while not seen and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.5)
print(f"done told {seen}\\n", end="", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_ranks_are_told_once(tmp_path: Path, number: int) -> None:
    _, done, err = _run(tmp_path, 2, [], "--min-np", "1", script=_TOLD, last=[str(tmp_path / "pid"), str(int(number))])
    told = [line for line in done if "told" in line]
    assert len(told) == 2 and all(line.count(",") == 0 and "[]" not in line for line in told), (done, err)
    assert "ProcessLookupError" not in err


def test_an_error_of_all_ranks_is_horonruns(tmp_path: Path) -> None:
    status, _, err = _run(tmp_path, 2, [(4, "raise", 0), (4, "raise", 1)], "--min-np", "1")
    assert status == 1
    assert "ValueError: a bug of its own" in err


def test_without_min_np_a_job_ends(tmp_path: Path) -> None:
    status, done, err = _run(tmp_path, 2, [(5, "kill", 1)], "--min-np", "2")
    assert status == 128 + signal.SIGKILL and not done
    assert "horonrun: rank 1 was ended by signal 9; the others were ended" in err


def test_settings() -> None:
    from horon.common._elastic_settings import elastic_settings

    assert elastic_settings({}) is None
    assert elastic_settings({"HORON_ELASTIC_MIN_NP": "", "HOROVOD_ELASTIC_TIMEOUT": "5"}) is None
    found = elastic_settings({"HORON_ELASTIC_MIN_NP": "2"})
    assert found is not None and (found.least, found.timeout) == (2, timedelta(seconds=600))
    found = elastic_settings({"HORON_ELASTIC_MIN_NP": "2", "HOROVOD_ELASTIC_TIMEOUT": "1.5"})
    assert found is not None and found.timeout == timedelta(seconds=1.5)
    found = elastic_settings(
        {"HOROVOD_ELASTIC_MIN_NP": "3", "HORON_ELASTIC_TIMEOUT": "2", "HOROVOD_ELASTIC_TIMEOUT": "9"}
    )
    assert found is not None and (found.least, found.timeout) == (3, timedelta(seconds=2))
    for name, value in (
        *[("HORON_ELASTIC_MIN_NP", text) for text in ("0", "-1", "x", "1.5")],
        *[("HOROVOD_ELASTIC_TIMEOUT", text) for text in ("0", "x", "inf", "nan")],
    ):
        with pytest.raises(ValueError, match=f"{name}='{re.escape(value)}': expected"):
            elastic_settings({"HORON_ELASTIC_MIN_NP": "2", name: value})
