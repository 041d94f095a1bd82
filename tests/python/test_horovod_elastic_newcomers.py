"""Elastic training whose lost ranks come again: hvd.elastic.run under horonrun --min-np --max-restarts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from harness import on_gloo
from test_horovod_run_hosts import path_with_ssh  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.any_torch, pytest.mark.skipif(on_gloo(), reason="horon's own")]

_TIMEOUT_S = 150

# ---- pure ----


def test_newcomers_come_last() -> None:
    from horon._newcomers import Admission, admit

    made = admit(Admission(), [0, 2], {1: 1}, [])
    assert (made.number, made.members, made.newcomers, made.seen) == (1, [0, 2, 1], {1: 1}, {1})
    made = admit(made, [0, 1], {1: 1, 2: 2}, [])
    assert (made.number, made.members, made.newcomers, made.seen) == (2, [0, 1, 2], {1: 1, 2: 2}, {1, 2})


def test_who_has_ended_is_not_let_in_and_not_asked_again() -> None:
    from horon._newcomers import Admission, admit

    made = admit(Admission(), [0, 2], {1: 1, 2: 1}, [1])
    assert (made.members, made.newcomers, made.seen) == ([0, 2, 1], {1: 2}, {1, 2})
    made = admit(Admission(), [0, 2], {1: 1}, [1])
    assert (made.members, made.newcomers, made.seen) == ([0, 2], {}, {1})


def test_who_comes_before_the_death_is_noticed_waits() -> None:
    from horon._newcomers import Admission, admit

    made = admit(Admission(), [0, 1, 2], {1: 1}, [])
    assert (made.members, made.seen) == ([0, 1, 2], set())
    assert admit(made, [0, 2], {1: 1}, []).members == [0, 2, 1]


def test_an_admission_travels_as_text() -> None:
    from horon._newcomers import Admission

    admission = Admission(3, [2, 0, 1], {0: 7, 1: 9}, {7, 9, 8})
    assert Admission.decode(admission.encode()) == admission


# ---- by the launcher ----

_TRAINS = """
import os, sys, time
import torch
import horon.torch as hvd
from horon.common._context import default_context

me = os.environ["HOROVOD_RANK"]
newcomer = os.environ.get("HORON_ELASTIC_NEWCOMER", "0")
plan = dict(one.split(":") for one in sys.argv[1].split(","))  # how each process ends, by rank.newcomer
how = plan.get(f"{me}.{newcomer}")


def die():
    os.kill(os.getpid(), 9)


if how == "at the beginning":
    die()
if how == "in the meeting":
    import horon.common._context as context
    context._exchange_topology = lambda *_: die()

hvd.init()
torch.manual_seed(int(me))
model = torch.nn.Linear(4, 1)
sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)
state = hvd.elastic.TorchState(model=model, sampler=sampler, batch=0)  # an optimizer takes seconds to import
sizes = []
deadline = time.monotonic() + 100


def sync_and_die():
    if hvd.size() == int(sys.argv[2]) and len(sizes) > 1:
        die()
    sync()


if how == "in the sync after an admission":
    sync, state.sync = state.sync, sync_and_die


@hvd.elastic.run
def train(state):
    sizes.append(hvd.size())
    if how == "when it is one":
        die()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()
    while state.batch < 5 or (hvd.size() < int(sys.argv[2]) and time.monotonic() < deadline):
        if state.batch == 3 and how == "while training":
            die()
        loss = (model(torch.ones(2, 4) * (1 + hvd.rank())) - 3).square().mean()
        with torch.no_grad():
            model.weight -= 0.05 * hvd.allreduce(torch.autograd.grad(loss, model.weight)[0], name="gradient")
        state.batch += 1
        time.sleep(0.02)
        state.commit()
    assert len(sampler) == 24 // hvd.size()


train(state)
while not eval(sys.argv[3]):
    time.sleep(0.05)
copies = hvd.allgather(model.weight.detach().flatten()[None])
assert (copies == copies[0]).all()
sizes_at_0 = hvd.broadcast_object(sizes)
hvd.shutdown()
hvd.init()  # of those who are there
print(f"done {me} as {hvd.rank()} of {hvd.size()}: {sizes_at_0}")
hvd.shutdown()
"""


def _run(
    folder: Path,
    n_ranks: int,
    plan: str,
    *options: str,
    until: int | None = None,
    after: str = "True",
    script: str = _TRAINS,
    **env: str,
) -> tuple[int, list[str], str]:
    """Exit status, what ranks that were done have printed, stderr."""
    file = folder / "train.py"
    file.write_text(script)
    command = [sys.executable, "-m", "horon.runner.launch", "-np", str(n_ranks), *options, sys.executable, str(file)]
    process = subprocess.Popen(
        [*command, plan, str(n_ranks if until is None else until), after],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        print(process.communicate())
        raise
    return process.returncode, sorted(line for line in out.splitlines() if line.startswith("done")), err


@pytest.mark.parametrize(("n_ranks", "lost", "order"), [(3, 1, [0, 2, 1]), (2, 1, [0, 1]), (2, 0, [1, 0])])
def test_who_has_died_comes_again(tmp_path: Path, n_ranks: int, lost: int, order: Sequence[int]) -> None:
    status, done, err = _run(tmp_path, n_ranks, f"{lost}.0:while training", "--min-np", "1", "--max-restarts", "1")
    assert status == 0, err
    sizes = [n_ranks, n_ranks - 1, n_ranks]
    assert done == sorted(f"done {rank} as {place} of {n_ranks}: {sizes}" for place, rank in enumerate(order)), err
    assert f"horonrun: rank {lost} is started anew (1 of --max-restarts 1)" in err
    assert f"horon: rank {lost}, started anew, waits until the others commit" in err


@pytest.mark.parametrize("how", ["in the meeting", "when it is one"])
def test_a_newcomer_that_dies_is_followed_by_another(tmp_path: Path, how: str) -> None:
    plan = f"1.0:while training,1.1:{how}"
    status, done, err = _run(tmp_path, 3, plan, "--min-np", "1", "--max-restarts", "2")
    assert status == 0, err
    assert [line.partition(":")[0] for line in done] == ["done 0 as 0 of 3", "done 1 as 2 of 3", "done 2 as 1 of 3"]
    assert "horonrun: rank 1 is started anew (2 of --max-restarts 2)" in err
    assert ("before the others had let it in" in err) == (how != "when it is one")


@pytest.mark.parametrize("survivor", [0, 2])
def test_a_survivor_dies_while_a_newcomer_is_told_the_state(tmp_path: Path, survivor: int) -> None:
    """What the others have seen differs: some are in hvd.init() yet. If they went apart, each would be done alone."""
    plan = f"1.0:while training,{survivor}.0:in the sync after an admission"
    options = ("--min-np", "1", "--max-restarts", "2", "--elastic-timeout", "30")
    status, done, err = _run(tmp_path, 4, plan, *options)
    assert status == 0, err
    places = {line.split()[1]: line.split(":")[0].split(" as ")[1] for line in done}
    assert sorted(places.values()) == [f"{place} of 4" for place in range(4)], (done, err)
    assert places[str(survivor)] == "3 of 4", done


_STARTS_ANOTHER = """
import os, subprocess, sys

alone = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"}


def check():
    environment = {**os.environ, **alone}
    del environment["TORCHELASTIC_USE_AGENT_STORE"]
    command = [sys.executable, "-c", "import horon.torch as hvd; hvd.init(); assert hvd.size() == 1"]
    with open("log", "a") as log:
        log.flush()
        subprocess.run(command, check=True, env=environment)
    return not os.path.getsize("log")
"""


def test_processes_that_ranks_start_are_no_newcomers(tmp_path: Path) -> None:
    (tmp_path / "another.py").write_text(_STARTS_ANOTHER)
    after = "__import__('another').check()"
    options = ("--min-np", "1", "--max-restarts", "1")
    status, done, err = _run(tmp_path, 2, "1.0:while training", *options, after=after)
    assert status == 0, err
    assert [line.partition(":")[0] for line in done] == ["done 0 as 0 of 2", "done 1 as 1 of 2"]


_MEETS_BY_ITSELF = """
import os, time
import torch, torch.distributed as dist
import horon
from horon._joined import launcher_store

dist.init_process_group("horon")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
try:
    dist.all_reduce(torch.ones(2))
except dist.DistBackendError:
    horon.shrink_to_survivors(min_size=1)
while launcher_store().add("restarts", 0) < 2:
    time.sleep(0.1)
print("done 0")
"""


def test_newcomers_can_not_make_the_others_groups(tmp_path: Path) -> None:
    options = ("--min-np", "1", "--max-restarts", "1")
    status, done, err = _run(tmp_path, 2, "-", *options, script=_MEETS_BY_ITSELF)
    assert (status, done) == (0, ["done 0"]), err
    assert "joins the others in hvd.init(), when they start over under hvd.elastic.run" in err


def test_the_variables_are_taken_out_of_the_environment() -> None:
    from horon._newcomers import Incarnation, take_incarnation

    notes, to_write = os.pipe()
    names = ("HORON_ELASTIC_RESTARTS", "HORON_ELASTIC_NEWCOMER", "HORON_ELASTIC_NOTES")
    values = ("3", "2", f"{to_write}.{os.fstat(to_write).st_ino}")
    environment = dict(zip(names, values, strict=True))
    own = take_incarnation(environment, 5)
    assert own is not None and own.name == "5.2" and not environment
    own.note()
    assert os.read(notes, 2) == b"!"
    for wrong in (f"{to_write}.1", "99999.1", "", "x.y"):  # somebody in between has closed it
        Incarnation(5, 2, wrong).note()
    os.close(to_write)
    assert os.read(notes, 2) == b""
    os.close(notes)
    assert take_incarnation({}, 5) is None


def test_two_come_again(tmp_path: Path) -> None:
    plan = "1.0:while training,0.0:while training"
    status, done, err = _run(tmp_path, 4, plan, "--min-np", "2", "--max-restarts", "5")
    assert status == 0, err
    places = {line.split()[1]: line.split(":")[0].split(" as ")[1] for line in done}
    assert places["2"] == "0 of 4" and places["3"] == "1 of 4", done
    assert {places["0"], places["1"]} == {"2 of 4", "3 of 4"}, done


def test_restarts_are_used_up(tmp_path: Path) -> None:
    plan = "1.0:while training,1.1:at the beginning"
    after = "__import__('horon')._joined.launcher_store().add('restarts', 0) == 2"  # it would have been the second
    status, done, err = _run(tmp_path, 3, plan, "--min-np", "1", "--max-restarts", "1", until=1, after=after)
    assert status == 0, err
    assert "rank 1, started anew, was ended by signal 9 before the others had let it in" in err
    assert [line.partition(":")[0] for line in done] == ["done 0 as 0 of 2", "done 2 as 1 of 2"]


def test_a_newcomer_that_comes_when_the_others_are_done_ends_well(tmp_path: Path) -> None:
    options = ("--min-np", "1", "--max-restarts", "1")
    after = "default_context.has_newcomers()"  # they commit no more
    status, done, err = _run(tmp_path, 3, "1.0:while training", *options, until=1, after=after)
    assert status == 0, err
    assert [line.partition(":")[0] for line in done] == ["done 0 as 0 of 2", "done 2 as 1 of 2"]
    assert "horonrun: rank 1 is started anew (1 of --max-restarts 1)" in err
    assert "horon: rank 1, started anew, ends: the others are done" in err


_TRAINS_AS_USUAL = """
import os, sys, time
import torch
import horon.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
kinds = {"adam": torch.optim.Adam, "sgd": lambda *args, **more: torch.optim.SGD(*args, momentum=0.9, **more)}
kind = kinds[sys.argv[1]]


def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    return model, hvd.DistributedOptimizer(kind(model.parameters(), lr=0.01), model.named_parameters())


is_inside = sys.argv[3] == "inside"
model, optimizer = (None, None) if is_inside else build()
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, full_since=0)
deadline = time.monotonic() + 100


@hvd.elastic.run
def train(state):
    model, optimizer = build() if is_inside else (state.model, state.optimizer)
    if is_inside:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    while state.batch < 5 or (state.batch < state.full_since + 8 and time.monotonic() < deadline):
        if state.batch == 3 and os.environ["HOROVOD_RANK"] == "1" and not os.path.exists("lost"):
            open("lost", "w").close()
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        (model(torch.randn(8, 4)) - 3).square().mean().backward()
        optimizer.step()
        state.batch += 1
        if hvd.size() < int(sys.argv[2]):
            state.full_since = state.batch
        time.sleep(0.02)
        state.commit()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


weights = train(state)
copies = hvd.allgather(weights[None])
assert (copies == copies[0]).all()
print(f"done {os.environ['HOROVOD_RANK']} as {hvd.rank()} of {hvd.size()}: {state.batch - state.full_since} steps")
"""


@pytest.mark.parametrize(("kind", "where"), [("adam", "outside"), ("sgd", "inside")])
def test_optimizers_of_newcomers_and_of_others_fit(tmp_path: Path, kind: str, where: str) -> None:
    """They have names by which ranks compare them, made when the optimizer is, in one process long before the other."""
    options = ("--min-np", "1", "--max-restarts", "1")
    status, done, err = _run(tmp_path, 3, kind, *options, script=_TRAINS_AS_USUAL, after=where)
    assert status == 0, err
    order = enumerate([0, 2, 1])
    assert done == sorted(f"done {rank} as {place} of 3: 8 steps" for place, rank in order), err


def test_over_hosts(tmp_path: Path, path_with_ssh: str) -> None:  # noqa: F811  (the fixture)
    options = ("--min-np", "2", "--max-restarts", "3", "-H", "localhost:2,far:2")
    status, done, err = _run(tmp_path, 4, "0.0:while training", *options, PATH=path_with_ssh)
    assert status == 0, err
    expected = sorted(f"done {rank} as {place} of 4" for place, rank in enumerate([1, 2, 3, 0]))
    assert [line.partition(":")[0] for line in done] == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("-np 2 --max-restarts 1 true", "--max-restarts needs a --min-np that is less than -np"),
        ("-np 2 --min-np 2 --max-restarts 1 true", "--max-restarts needs a --min-np that is less than -np"),
        ("-np 2 --min-np 1 --max-restarts -1 true", "expected 0 or more, got -1"),
        ("-np 2 --min-np 1 --max-restarts x true", "invalid int value"),
    ],
)
def test_command_lines_that_are_refused(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    from horon.runner.launch import plan

    with pytest.raises(SystemExit):
        plan(line.split())
    assert re.search(complaint, capsys.readouterr().err)
