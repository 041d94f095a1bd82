"""hvd.init(): alone, torchrun, mpirun, Horovod's variables, beside other groups, again and again, from many threads."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import STALL_S, assert_clean_exits, expect_error, on_gloo, run_fresh_processes, run_ranks
from horovod_session import horovod
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

SCRIPT = """
import sys
import torch
import horon.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(5) * hvd.rank(), op=hvd.Sum, name="x")
assert total.tolist() == [float(sum(range(hvd.size())))] * 5
place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
sys.stdout.write(" ".join(map(str, ("place", *place))) + "\\n")  # at once: the ranks share a pipe
sys.stdout.flush()
hvd.shutdown()
hvd.init()
hvd.barrier()
"""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "OMPI_",
    "PMI",
    "HOROVOD_",
    "MASTER_",
    "PRTE_",
    "GROUP_",
    "SLURM_",
)


def _environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _places(outputs: list[str]) -> list[list[int]]:
    lines = [line for text in outputs for line in text.splitlines() if "place" in line]
    return sorted([int(word) for word in line[line.index("place") :].split()[1:]] for line in lines)


def _run(commands: list[tuple[list[str], dict[str, str]]], folder: Path) -> list[list[int]]:
    processes = [
        subprocess.Popen(command, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command, env in commands
    ]
    try:
        ended = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, out[-2000:] + err[-4000:]
    return _places([out for out, _ in ended])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_alone(script: Path) -> None:
    places = _run([([sys.executable, str(script)], _environment())], script.parent)
    assert places == [[0, 1, 0, 1, 0, 1]]


def test_torchrun(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    assert _run([(command, _environment())], script.parent) == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]


def test_settings_that_mean_nothing_here_are_named_once(script: Path) -> None:
    """By rank 0 alone, however often init is called."""
    env = _environment(HOROVOD_CYCLE_TIME="5", HOROVOD_AUTOTUNE="1", HOROVOD_FUSION_THRESHOLD="0")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(command, env=env, cwd=script.parent, text=True, capture_output=True, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]
    told = sorted(
        line.split()[-1] for line in result.stderr.replace(" has no effect", "\n").splitlines() if "HOROVOD_" in line
    )
    assert told == ["HOROVOD_AUTOTUNE", "HOROVOD_CYCLE_TIME"], result.stderr[-2000:]


def test_a_setting_that_makes_no_sense_is_an_error(script: Path) -> None:
    env = _environment(HOROVOD_FUSION_THRESHOLD="64MB")
    result = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=script.parent, text=True, capture_output=True, timeout=200
    )
    assert result.returncode != 0
    assert "HOROVOD_FUSION_THRESHOLD: expected a number of bytes, got '64MB'" in result.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_mpirun(script: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, str(script)]
    assert _run([(command, _environment())], script.parent) == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]


def test_mpi_variables_without_mpi(script: Path, tmp_path: Path) -> None:
    """As in a container in which only the variables arrive; the ranks meet in a file."""
    shared = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "TMPDIR": str(tmp_path)}
    commands = [
        (
            [sys.executable, str(script)],
            _environment(
                OMPI_COMM_WORLD_RANK=str(rank),
                OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                PMIX_NAMESPACE=f"test-{os.getpid()}",
                **shared,
            ),
        )
        for rank in range(2)
    ]
    assert _run(commands, script.parent) == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]


def test_srun_on_one_node(script: Path, tmp_path: Path) -> None:
    """As ``srun --mpi=pmix -n 2`` does it: no MPI variable says how many there are."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    commands = [
        (
            [sys.executable, str(script)],
            _environment(
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                PMIX_RANK=str(rank),
                SLURM_STEP_NUM_TASKS="2",
                TMPDIR=str(tmp_path),
                **step,
            ),
        )
        for rank in range(2)
    ]
    assert _run(commands, script.parent) == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]


def test_horovod_variables(script: Path) -> None:
    port = str(_free_port())
    commands = [
        (
            [sys.executable, str(script)],
            _environment(
                HOROVOD_RANK=str(rank),
                HOROVOD_SIZE="2",
                HOROVOD_LOCAL_RANK="0",
                HOROVOD_LOCAL_SIZE="1",
                HOROVOD_CROSS_RANK=str(rank),
                HOROVOD_CROSS_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
        )
        for rank in range(2)
    ]
    assert _run(commands, script.parent) == [[0, 2, 0, 1, 0, 2], [1, 2, 0, 1, 1, 2]]


def test_two_processes_with_one_rank(script: Path) -> None:
    """Ranks 0, 1 and 1 again of three: all are told at once, not at the timeout, and of both processes."""
    shared = {"HOROVOD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=_environment(HOROVOD_RANK=rank, HORON_TIMEOUT_SECONDS="100", **shared),
            cwd=script.parent,
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in ("0", "1", "1")
    ]
    try:
        texts = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 1
        assert "rank 1 has come twice to the group of 3 ranks: as process" in text, text
        assert all(str(twin.pid) in text for twin in processes[1:]), text


def test_before_init() -> None:
    import horon.torch as hvd

    assert not hvd.is_initialized()
    calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_homogeneous]
    calls += [hvd.barrier, hvd.join, hvd.stop_timeline]
    tensor = torch.ones(2)
    calls += [
        lambda: hvd.allreduce(tensor),
        lambda: hvd.allgather(tensor),
        lambda: hvd.broadcast(tensor, 0),
        lambda: hvd.alltoall(tensor),
        lambda: hvd.reducescatter(tensor),
        lambda: hvd.start_timeline("/tmp/unused"),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(tensor)], lr=1)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
            call()


@pytest.mark.parametrize("variable", ["HORON_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "abc", "0", "-1", "0.0001", "315360001", " "])
def test_timeouts_out_of_range(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    import horon.torch as hvd

    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"{variable}='{re.escape(value)}': .*from 0\.001 to 315360000") as caught:
        hvd.init()
    assert caught.value.__cause__ is None and not hvd.is_initialized()


def _unwritable_timeline(rank: int, size: int) -> None:
    import horon.torch as hvd

    with pytest.raises(ValueError, match=r"timeline can not be written to '/missing/timeline\.json'"):
        hvd.init()
    assert not hvd.is_initialized() and not dist.is_initialized()
    del os.environ["HORON_TIMELINE"]
    hvd.init()
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
    hvd.shutdown()
    assert not dist.is_initialized()


def test_a_timeline_that_can_not_be_written_leaves_no_group() -> None:
    env = {"HORON_TIMELINE": "/missing/timeline.json"}
    assert_clean_exits(run_fresh_processes(_unwritable_timeline, 1, init=False, env=env))


@pytest.mark.parametrize("value", ["0.001", "1e3", "315360000"])
def test_timeouts_in_range(script: Path, value: str) -> None:
    """The clocks of stores and engines take them."""
    places = _run([([sys.executable, str(script)], _environment(HORON_TIMEOUT_SECONDS=value))], script.parent)
    assert places == [[0, 1, 0, 1, 0, 1]]


def _waits_ten_years(rank: int, size: int) -> None:
    os.environ["HORON_TIMEOUT_SECONDS"] = "315360000"
    with horovod() as hvd:
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2
        hvd.barrier()


def test_the_longest_timeout_among_ranks() -> None:
    run_ranks(_waits_ten_years, 2)


def _joins_default_group(rank: int, size: int) -> None:
    group = dist.group.WORLD
    with horovod() as hvd:
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert dist.group.WORLD is group
        hvd.init()  # a no-op
        tensor = torch.ones(3)
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="a")
        dist.all_reduce(tensor)  # both kinds at once
        assert hvd.synchronize(handle).tolist() == [size] * 3
        assert tensor.tolist() == [size] * 3
    assert not hvd.is_initialized() and dist.group.WORLD is group
    dist.barrier()


@pytest.mark.parametrize("backend", ["horon", "gloo"])
def test_joins_the_default_group_and_leaves_it(backend: str) -> None:
    run_ranks(_joins_default_group, 2, backend=backend)


def _one_stays_away(rank: int, size: int) -> None:
    os.environ["HORON_TIMEOUT_SECONDS"] = "1.5"
    import horon.torch as hvd

    if rank != 1:
        message = expect_error(hvd.init, "RuntimeError", within_s=10)
        assert "rank(s) [1]" in message and "1.5 s" in message, message
        assert not hvd.is_initialized()
    dist.barrier()


@pytest.mark.parametrize("backend", ["horon", "gloo"])
def test_a_rank_of_the_default_group_that_stays_away_is_named(backend: str) -> None:
    assert_clean_exits(run_fresh_processes(_one_stays_away, 3, backend=backend, timeout=60))


def _ends_within_init(rank: int, size: int, path: str, where: str, victim: int) -> None:
    import horon.torch as hvd
    from horon.common import _context

    dist.init_process_group("horon", store=dist.FileStore(path, size), rank=rank, world_size=size)
    if rank == victim:

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        target, name = {"before its place": (_context, "_exchange_topology"), "after it": (_context._C, "NamedEngine")}[
            where
        ]
        setattr(target, name, die)
    message = expect_error(hvd.init, within_s=15)
    assert f"rank {victim} (pid" in message and "died" in message, message


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("where", ["before its place", "after it"])
def test_a_rank_that_dies_within_init_is_named(where: str, victim: int, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = run_fresh_processes(_ends_within_init, 3, path, where, victim, init=False, timeout=60)
    assert_clean_exits(outcomes, [-signal.SIGKILL if rank == victim else 0 for rank in range(3)])


def _interrupted_within_init(rank: int, size: int, where: str) -> None:
    import horon.torch as hvd
    from horon.common import _context, _topology

    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["interrupted"], timedelta(seconds=30))
        return
    if where == "in the engine":

        def exchange_alone(*_: object) -> object:
            return _topology.Topology(rank, size, rank, size, 0, 1, True)

        _context._exchange_topology = exchange_alone
    began_s = time.monotonic()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        hvd.init()
    assert time.monotonic() - began_s < 0.5 + STALL_S
    dist.distributed_c10d._get_default_store().set("interrupted", "")


@pytest.mark.parametrize("where", ["in the exchange of places", "in the engine"])
def test_ctrl_c_within_init(where: str) -> None:
    assert_clean_exits(run_fresh_processes(_interrupted_within_init, 2, where, timeout=60))


def _ddp_beside(rank: int, size: int) -> list[float]:
    with horovod() as hvd:
        torch.manual_seed(0)
        mine, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        theirs.load_state_dict(mine.state_dict())
        ddp = DDP(theirs)
        ours = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters())
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            for model, optimizer in ((ddp, plain), (mine, ours)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
            plain.step()
            ours.step()
        torch.testing.assert_close(mine.weight, theirs.weight)
        return mine.weight.flatten().tolist()


def test_ddp_and_distributed_optimizer_side_by_side() -> None:
    results = run_ranks(_ddp_beside, 2)
    assert results[0] == results[1]


def _makes_default_group(rank: int, size: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=folder)
    import horon.torch as hvd

    hvd.init()
    assert dist.get_backend() == "horon" and dist.get_world_size() == size
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2
    with pytest.raises(ValueError, match=r"twice.*init_process_group before hvd\.init"):
        dist.init_process_group("gloo")
    hvd.shutdown()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")  # Now it is the user's again.
    hvd.init()
    hvd.shutdown()
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()
    hvd.init()  # The end of the process is the shutdown.


def test_makes_the_default_group_and_says_the_order() -> None:
    assert_clean_exits(run_fresh_processes(_makes_default_group, 2, str(_free_port()), init=False))


def _many_times(rank: int, size: int, times: int) -> None:
    import horon.torch as hvd
    import psutil

    process = psutil.Process()

    def once(i: int) -> None:
        hvd.init()
        assert hvd.allreduce(torch.full((4,), float(i)), op=hvd.Sum).tolist() == [float(i * size)] * 4
        hvd.shutdown()

    for i in range(20):
        once(i)
    dist.barrier()
    before = process.num_fds(), process.num_threads(), process.memory_info().rss
    for i in range(times - 20):
        once(i)
    dist.barrier()
    fds, threads, rss = process.num_fds(), process.num_threads(), process.memory_info().rss
    assert fds <= before[0] + 2 and threads <= before[1] + 1, (before, fds, threads)
    assert rss <= before[2] + 40 * 2**20, (before, rss)


def test_200_times() -> None:
    run_ranks(_many_times, 2, 200, timeout=120)


def _from_threads(rank: int, size: int) -> None:
    import horon.torch as hvd

    errors: list[BaseException] = []

    def start() -> None:
        try:
            hvd.init()
            assert hvd.rank() == rank
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    hvd.barrier()
    hvd.shutdown()
    hvd.shutdown()


def test_from_threads() -> None:
    run_ranks(_from_threads, 2)


def _subset(rank: int, size: int) -> None:
    import horon.torch as hvd

    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not among them"):
            hvd.init(comm=[2, 0])
    else:
        hvd.init(comm=[2, 0])
        assert (hvd.rank(), hvd.size()) == ([2, 0].index(rank), 2)
        assert hvd.allgather(torch.tensor([rank])).tolist() == [2, 0]
        hvd.shutdown()
    dist.barrier()


def test_subset_of_the_ranks() -> None:
    run_ranks(_subset, 3)


class _WhoAmI(torch.utils.data.Dataset):
    """What a dataset asks in a DataLoader's worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        import horon.torch as hvd

        place = [os.getpid(), int(hvd.is_initialized()), hvd.rank(), hvd.size()]
        refused = False
        try:
            hvd.init()
        except RuntimeError as error:
            refused = "forked" in str(error) and "spawn" in str(error)
        return [*place, int(refused)]


def _in_workers(rank: int, size: int) -> None:
    with horovod() as hvd:
        loader = torch.utils.data.DataLoader(_WhoAmI(), num_workers=1, multiprocessing_context="fork", timeout=30)
        for batch in loader:
            pid, *found = [int(number) for number in batch]
            assert pid != os.getpid()
            # A lone process may be initialised again: there is nobody to be waited for.
            assert found == [1, rank, size, int(size > 1)], found
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_forked_workers_know_their_rank(size: int) -> None:
    run_ranks(_in_workers, size)
