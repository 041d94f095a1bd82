"""Elastic training that loses ranks: hvd.elastic.run under horonrun --min-np."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from harness import on_gloo
from test_horovod_run_hosts import path_with_ssh  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

_TIMEOUT_S = 120
_SCRIPT = """
import json, os, signal, sys, time
import torch
import horon.torch as hvd

plan = json.loads(sys.argv[1])  # at which batch, by what, which rank of the job
hvd.init()
me = int(os.environ["HOROVOD_RANK"])
torch.manual_seed(me)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0)
starts = []
state.register_reset_callbacks([lambda: starts.append(hvd.size())])


@hvd.elastic.run
def train(state):
    print(f"start {me} as {hvd.rank()} of {hvd.size()} at {state.batch}, {len(sampler)} samples\\n", end="", flush=True)
    assert hvd.local_size() <= hvd.size() and hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    while state.batch < 12:
        for at, how, who in plan:
            if at == state.batch and who == me:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "exit":
                    os._exit(7)
                if how == "raise":
                    raise ValueError("a bug of its own")
                if how == "disagree" and hvd.size() == 3 and not starts:
                    hvd.allreduce(torch.ones(2 + hvd.rank()), name="disagree")
        optimizer.zero_grad()
        (model(torch.ones(2, 4) * (1 + hvd.rank())) - 3).square().mean().backward()
        optimizer.step()
        state.batch += 1
        state.commit()
    return [round(float(x), 6) for x in model.weight.detach().flatten()]


weights = train(state)
print(f"done {me} as {hvd.rank()} of {hvd.size()} {weights} {starts}\\n", end="", flush=True)
hvd.shutdown()
hvd.init()  # of those who are left
assert hvd.size() == (starts[-1] if starts else int(os.environ["HOROVOD_SIZE"]))
"""


def _run(
    folder: Path, n_ranks: int, plan: str, *options: str, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    command = [
        sys.executable,
        "-m",
        "horon.runner.launch",
        "-np",
        str(n_ranks),
        *options,
        sys.executable,
        str(script),
        plan,
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        raise
    return process.returncode, out, err


def _done(out: str) -> list[tuple[int, int, int, str]]:
    """Job's rank, rank, size, weights; by rank."""
    found = re.findall(r"^done (\d+) as (\d+) of (\d+) (\[.*?\])", out, re.MULTILINE)
    return sorted(
        ((int(me), int(rank), int(size), weights) for me, rank, size, weights in found), key=lambda one: one[1]
    )


@pytest.mark.parametrize(
    ("n_ranks", "plan", "left"),
    [
        (3, '[[5, "kill", 1]]', [0, 2]),
        (3, '[[5, "kill", 0]]', [1, 2]),
        (2, '[[0, "exit", 0]]', [1]),
        (4, '[[3, "kill", 0], [8, "kill", 3]]', [1, 2]),
        (4, '[[4, "kill", 1], [4, "kill", 2]]', [0, 3]),
        (3, '[[2, "disagree", 0], [2, "disagree", 1], [2, "disagree", 2], [6, "kill", 0]]', [1, 2]),
    ],
)
def test_the_others_go_on(tmp_path: Path, n_ranks: int, plan: str, left: list[int]) -> None:
    status, out, err = _run(tmp_path, n_ranks, plan, "--min-np", str(len(left)))
    assert status == 0, err
    done = _done(out)
    assert [(me, rank, size) for me, rank, size, _ in done] == [(me, i, len(left)) for i, me in enumerate(left)]
    assert len({weights for *_, weights in done}) == 1
    assert err.count("the others go on") == n_ranks - len(left)
    assert "too few" not in err


def test_it_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    status, out, err = _run(tmp_path, 3, '[[5, "kill", 2]]', "--min-np", "1")
    assert status == 0, err
    starts = sorted(re.findall(r"^start (\d) as (\d) of (\d) at (\d+), (\d+) samples", out, re.MULTILINE))
    assert starts == [
        ("0", "0", "2", "5", "12"),
        ("0", "0", "3", "0", "8"),
        ("1", "1", "2", "5", "12"),
        ("1", "1", "3", "0", "8"),
        ("2", "2", "3", "0", "8"),
    ]
    assert "horonrun: rank 2 was ended by signal 9; 2 of 3 ranks are left, and --min-np is 1: the others go on" in err


def test_too_few_are_left(tmp_path: Path) -> None:
    status, out, err = _run(tmp_path, 3, '[[3, "kill", 1], [7, "kill", 2]]', "--min-np", "2")
    assert status != 0
    assert _done(out) == []
    assert "2 of 3 ranks are left, and --min-np is 2: the others go on" in err
    assert "1 of 3 ranks are left, and --min-np is 2: too few" in err


def test_an_error_of_all_ranks_is_an_error(tmp_path: Path) -> None:
    plan = '[[4, "raise", 0], [4, "raise", 1], [4, "raise", 2]]'
    status, _, err = _run(tmp_path, 3, plan, "--min-np", "2")
    assert status == 1
    assert "ValueError: a bug of its own" in err


def test_without_min_np_a_job_ends(tmp_path: Path) -> None:
    for options in ((), ("--min-np", "3")):
        status, out, err = _run(tmp_path, 3, '[[5, "kill", 1]]', *options)
        assert status == 128 + signal.SIGKILL
        assert _done(out) == []
        assert "horonrun: rank 1 was ended by signal 9; the others were ended" in err


@pytest.mark.parametrize("victim", [0, 3])
def test_over_hosts(tmp_path: Path, path_with_ssh: str, victim: int) -> None:  # noqa: F811  (the fixture)
    plan = f'[[5, "kill", {victim}]]'
    options = ("--min-np", "2", "-H", "localhost:2,far:2")
    status, out, err = _run(tmp_path, 4, plan, *options, env={"PATH": path_with_ssh})
    assert status == 0, err
    left = [me for me in range(4) if me != victim]
    assert [(me, rank, size) for me, rank, size, _ in _done(out)] == [(me, i, 3) for i, me in enumerate(left)]


def test_settings() -> None:
    from horon.common._elastic_settings import elastic_settings

    assert elastic_settings({}) is None
    assert elastic_settings({"HORON_ELASTIC_MIN_NP": "", "HOROVOD_ELASTIC_TIMEOUT": "5"}) is None
    found = elastic_settings({"HORON_ELASTIC_MIN_NP": "2"})
    assert found is not None and (found.least, found.timeout) == (2, timedelta(seconds=600))
    found = elastic_settings({"HORON_ELASTIC_MIN_NP": "2", "HOROVOD_ELASTIC_TIMEOUT": "1.5"})
    assert found is not None and found.timeout == timedelta(seconds=1.5)
    for name, value in (
        *[("HORON_ELASTIC_MIN_NP", text) for text in ("0", "-1", "x", "1.5")],
        *[("HOROVOD_ELASTIC_TIMEOUT", text) for text in ("0", "x", "inf", "nan")],
    ):
        with pytest.raises(ValueError, match=f"{name}='{re.escape(value)}': expected"):
            elastic_settings({"HORON_ELASTIC_MIN_NP": "2", name: value})
