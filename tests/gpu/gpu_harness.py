"""Runs functions as ranks that share one GPU, in processes that were executed and not forked.

`run_ranks` uses a pool of processes that lives as long as the pytest session, `run_fresh_processes` new ones, and
returns how each ended. A few processes that have imported torch are kept in reserve, because that takes seconds.

Several ranks on one GPU: NCCL takes GPUs of one bus id on one host for the same and refuses them, so each rank has a
NCCL_HOSTID of its own and NCCL goes over sockets; from NCCL 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 allows it.

Variables: HORON_GPU_TESTS_BACKEND (set by --backend; "horon", or "nccl" to check the tests themselves),
HORON_GPU_TESTS_ON_SIMULATOR=1 (on the simulated CUDA of tests/cuda_simulator; what needs true kernels is skipped),
HORON_GPU_TESTS_SPARES (processes in reserve), HORON_GPU_TESTS_MAX_S (no test's ranks get more seconds than that before
their stacks are shown and they are killed; where a GPU is lent for minutes only).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GRACE_S = 8.0
"""How long the other ranks of a failed test may go on before they are killed."""
START_S = 120.0
"""How long a process may take until it has imported torch."""
_NCCL_WITH_SEVERAL_RANKS_PER_GPU = (2, 30)


def on_simulator() -> bool:
    """Whether CUDA and NCCL are the simulated ones, which copy and communicate, and run no kernel of torch's."""
    return os.environ.get("HORON_GPU_TESTS_ON_SIMULATOR") == "1"


def tested_backend() -> str:
    """ "horon", or "nccl" when the tests themselves are being checked."""
    return os.environ.get("HORON_GPU_TESTS_BACKEND", "horon")


def on_nccl() -> bool:
    """Whether the tests run on PyTorch's own backend."""
    return tested_backend() == "nccl"


def group_backend() -> str:
    """What init_process_group is given: a group for CPU and CUDA tensors."""
    return "cpu:gloo,cuda:nccl" if on_nccl() else tested_backend()


def simulator_environment() -> dict[str, str]:
    """What makes a child process run on the simulated CUDA and NCCL, which is built if need be."""
    build = [sys.executable, str(HERE.parent / "cuda_simulator" / "build.py")]
    built = subprocess.run(build, capture_output=True, text=True)
    if built.returncode != 0:
        raise RankError(f"the CUDA simulator cannot be built:\n{built.stderr[-3000:]}")
    library = built.stdout.strip()
    preloaded = f"{library}:{os.environ['LD_PRELOAD']}" if os.environ.get("LD_PRELOAD") else library
    # Entries of streams are late by up to that much, so that what nobody waits for is not there in time.
    delay_us = os.environ.get("HORON_SIMULATOR_DELAY_US", "200")
    return {"LD_PRELOAD": preloaded, "HORON_SIMULATOR_DELAY_US": delay_us}


def capped(timeout_s: float) -> float:
    """The time limit, or HORON_GPU_TESTS_MAX_S where that is less."""
    return min(timeout_s, float(os.environ.get("HORON_GPU_TESTS_MAX_S", "inf")))


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that torch loads."""
    import torch

    return tuple(torch.cuda.nccl.version())


def environment_of(rank: int) -> dict[str, str]:
    """What a rank needs besides the session's environment: several ranks are on one GPU."""
    variables = {
        "HORON_GPU_TESTS_BACKEND": tested_backend(),
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NET_GDR_LEVEL": "LOC",
        # The kernels of all ranks have to be on the one GPU at the same time, or they wait for each other for ever.
        "NCCL_MAX_CTAS": "4",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }
    if nccl_version() >= _NCCL_WITH_SEVERAL_RANKS_PER_GPU:
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        variables["NCCL_HOSTID"] = f"horon-test-host-{rank}"
    return variables


class RankError(AssertionError):
    """One or more ranks raised, died, or did not finish in time."""


@dataclass
class Outcome:
    """How a fresh process ended. `exitcode` is minus the signal for one that was killed."""

    rank: int
    exitcode: int
    stdout: str
    stderr: str
    timed_out: bool


@dataclass
class Process:
    """A rank's process, and the files that its output goes to. It waits for ("worker" or "once"), then for jobs."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    stdout: Path
    stderr: Path
    stderr_read: int = field(default=0)

    def wait_until_ready(self) -> None:
        """Returns when torch has been imported; raises RankError if that fails."""
        try:
            if self.connection.poll(START_S) and self.connection.recv() == "ready":
                return
        except (EOFError, OSError):
            pass
        self.kill()
        raise RankError(f"a rank's process did not start:\n{self.stderr.read_text(errors='replace')[-6000:]}")

    def new_stderr(self) -> str:
        """What it wrote to stderr since the last call."""
        text = self.stderr.read_bytes()[self.stderr_read :]
        self.stderr_read += len(text)
        return text.decode(errors="replace")

    def kill(self, dump: bool = False) -> None:
        """Ends the process and whatever it has started; with `dump`, its Python stacks go to its stderr first."""
        if dump and self.popen.poll() is None:
            self.popen.send_signal(signal.SIGUSR2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(30)
        self.connection.close()


class Session:
    """The processes of one pytest session. Owns them, and the folder of their files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="horon-gpu-tests-"))
        self.workers: list[Process] = []
        self._spares: list[Process] = []
        self._names = itertools.count()
        default = min(4, (os.cpu_count() or 1) // 4)
        self._n_spares = int(os.environ.get("HORON_GPU_TESTS_SPARES", default))
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if on_simulator():
            self._environment.update(simulator_environment())

    def take(self, n: int) -> list[Process]:
        """Processes that have imported torch; the reserve is filled up again, without waiting for it."""
        while len(self._spares) < n:
            self._spares.append(self._start())
        taken, self._spares = self._spares[:n], self._spares[n:]
        for process in taken:
            process.wait_until_ready()
        while len(self._spares) < self._n_spares:
            self._spares.append(self._start())
        return taken

    def _start(self) -> Process:
        name = self.folder / f"process-{next(self._names)}"
        ours, theirs = socket.socketpair()
        stdout, stderr = Path(f"{name}.out"), Path(f"{name}.err")
        with open(stdout, "wb") as out, open(stderr, "wb") as err:
            popen = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_worker.py"), str(theirs.fileno())],
                stdout=out,
                stderr=err,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        return Process(popen, Connection(ours.detach()), stdout, stderr)

    def new_store(self) -> str:
        """A path for a FileStore that was never used."""
        return str(self.folder / f"store-{next(self._names)}")

    def close(self) -> None:
        """Ends all processes."""
        for process in [*self.workers, *self._spares]:
            process.kill()
        self.workers.clear()
        self._spares.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


_session: Session | None = None
_job_numbers = itertools.count()


def session() -> Session:
    """The session's processes, started when first needed."""
    global _session
    if _session is None:
        _session = Session()
    return _session


def close_session() -> None:
    """Ends all processes. The session's fixture calls it."""
    global _session
    if _session is not None:
        _session.close()
        _session = None


def _job(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    env = {**environment_of(rank), **(more.pop("env") or {})}
    path = str(Path(inspect.getsourcefile(fn) or "").resolve())
    return {
        "path": path,
        "function": fn.__name__,
        "rank": rank,
        "world_size": world_size,
        "args": args,
        "env": env,
        "backend": group_backend(),
        **more,
    }


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    init: bool = True,
    env: dict[str, str] | None = None,
    group_timeout_s: float = 60,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on every rank and returns the results by rank.

    Args:
        fn: A module-level function of a test file.
        timeout: Seconds after which the ranks are killed and the test fails.
        init: Whether to init and destroy the default group around `fn`.
        env: Variables set in the ranks for the time of the call.
        group_timeout_s: The default group's timeout.

    Raises:
        RankError: Naming each rank that failed, with its traceback.
    """
    pool = session()
    if len(pool.workers) < world_size:
        for process in pool.take(world_size - len(pool.workers)):
            process.connection.send("worker")
            pool.workers.append(process)
    workers = pool.workers[:world_size]
    store, number = pool.new_store(), next(_job_numbers)
    for rank, worker in enumerate(workers):
        worker.new_stderr()
        more = {"number": number, "init": init, "store": store, "group_timeout_s": group_timeout_s, "env": env}
        worker.connection.send(_job(fn, rank, world_size, args, **more))
    try:
        results, failures = _collect(workers, number, capped(timeout))
    except BaseException:  # Ctrl-C, pytest's own time limits: nobody may find these workers in the middle of a job.
        for worker in pool.workers:
            worker.kill()
        pool.workers.clear()
        raise
    if failures:
        # In an unknown state: the next test gets new ones. The idle ones go as well, since each has told NCCL once
        # and for all which host it is, by the rank that it has had so far.
        idle = pool.workers[world_size:]
        pool.workers.clear()
        for worker in idle:
            worker.kill()
        raise RankError("\n".join(_describe(fn, workers, failures)))
    return [results[rank] for rank in range(world_size)]


def _describe(fn: Callable[..., Any], workers: list[Process], failures: dict[int, str]) -> list[str]:
    lines = [f"{fn.__name__} failed on {len(failures)} of {len(workers)} ranks"]
    first: dict[str, int] = {}
    for rank, text in sorted(failures.items()):
        died = "process died" in text
        if died:
            with contextlib.suppress(subprocess.TimeoutExpired):
                workers[rank].popen.wait(2)
        workers[rank].kill(dump="no answer" in text)
        if died:
            text += f" with exit code {workers[rank].popen.returncode}"
        same = first.setdefault(text, rank)
        lines.append(f"---- rank {rank}: {text if same == rank else f'the same as rank {same}'}")
        lines.append(workers[rank].new_stderr()[-6000:])
    for rank in set(range(len(workers))) - set(failures):
        workers[rank].kill()
    return lines


def _collect(workers: list[Process], job_number: int, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait_any(list(pending), max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[call-overload]
            try:
                number, ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                assert number == job_number, f"rank {rank} answered job {number}, not {job_number}"
            except (EOFError, OSError):
                ok, value = False, "the process died"
            (results if ok else failures)[rank] = value
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in pending.values():
        why = f"{timeout_s} s" if not failures else f"{GRACE_S} s after another rank's failure"
        failures[rank] = f"no answer within {why}; killed"
    return results, failures


def run_fresh_processes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    group_timeout_s: float = 50,
) -> list[Outcome]:
    """Runs `fn(rank, world_size, *args)` in new processes and returns how each ended; raises nothing itself.

    The default group is made before, and not destroyed afterwards: the function does that, or does not.
    """
    pool = session()
    processes = pool.take(world_size)
    store = pool.new_store()
    for rank, process in enumerate(processes):
        process.connection.send("once")
        more = {"init": True, "store": store, "group_timeout_s": group_timeout_s, "env": env}
        process.connection.send(_job(fn, rank, world_size, args, **more))
    deadline = time.monotonic() + capped(timeout)
    outcomes = []
    for rank, process in enumerate(processes):
        timed_out = False
        try:
            process.popen.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            timed_out = True
        process.kill(dump=timed_out)
        texts = [path.read_text(errors="replace") for path in (process.stdout, process.stderr)]
        outcomes.append(Outcome(rank, process.popen.returncode, *texts, timed_out))
    return outcomes


def assert_clean_exits(outcomes: list[Outcome], codes: list[int] | None = None) -> None:
    """Fails, with the output of the process, unless every process ended in time with its expected exit code."""
    for outcome, code in zip(outcomes, codes or [0] * len(outcomes), strict=True):
        if outcome.timed_out or outcome.exitcode != code:
            how = "hung and was killed" if outcome.timed_out else f"ended with {outcome.exitcode}, not {code}"
            raise RankError(f"rank {outcome.rank} {how}\n{outcome.stdout[-2000:]}\n{outcome.stderr[-6000:]}")
