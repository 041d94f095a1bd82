"""Runs functions as the ranks of a process group.

`run_ranks` uses a pool of processes that lives as long as the pytest session; `run_fresh_processes` uses new ones and
returns how each ended. Both fork from one zygote (zygote.py), and end what they started, by process id, in time.
The backend under test is HORON_TEST_BACKEND ("horon" unless set); "gloo" validates the tests themselves. With
HORON_TEST_FORBID_GLOO=1 nothing in the ranks can make a Gloo group: within a host none is needed.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zygote

BACKEND = os.environ.get("HORON_TEST_BACKEND", "horon")
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
HERE = Path(__file__).resolve().parent
STRESS = os.environ.get("HORON_STRESS") == "1"
GRACE_S = 5.0
"""How long the other ranks of a failed test may go on before they are killed."""
STALL_S = 8.0
"""What a busy machine may add to something that is prompt. Far below the default group's timeout."""


def on_gloo() -> bool:
    """True when the tests themselves are being validated."""
    return os.environ.get("HORON_TEST_BACKEND", "horon") == "gloo"


def gloo_lacks(reason: str) -> None:
    """Skips the test on Gloo, which does not do this, or does it wrong."""
    if on_gloo():
        pytest.skip(f"gloo: {reason}")


needs_torch_214 = pytest.mark.skipif(TORCH_VERSION < (2, 14), reason="new in torch 2.14")
needs_torch_215 = pytest.mark.skipif(TORCH_VERSION < (2, 15), reason="new in torch 2.15")


class RankError(AssertionError):
    """One or more ranks raised, died, or did not finish in time."""


@dataclass
class Outcome:
    """How a fresh process ended. `exitcode` is minus the signal for one that was killed."""

    rank: int
    exitcode: int
    stdout: str
    stderr: str
    result: Any
    finished_s: float
    """time.monotonic() when the function returned, or when the end of the process was seen."""
    timed_out: bool
    left_processes: bool
    """Something that it had forked was still there, and was killed."""


class Zygote:
    """Our end of the fork server. `preload` is a library that the loader puts in front of all others."""

    def __init__(self, preload: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="horon-tests-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment[name] = "1"  # A forked process must not miss threads that its parent had.
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if preload:
            environment["LD_PRELOAD"] = " ".join(filter(None, [preload, environment.get("LD_PRELOAD")]))
        command = [sys.executable, str(HERE / "zygote.py"), "--serve", str(theirs.fileno())]
        self.environment = environment
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._socket = ours
        self._names = itertools.count()
        self.exits: dict[int, int] = {}
        kind, threads = self._receive(60)
        assert kind == "ready" and threads == 1, f"the zygote has {threads} threads; forking from it is not safe"

    def _receive(self, timeout_s: float) -> tuple[Any, ...]:
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(65536)
        if not data:
            raise RankError("the zygote died")
        return pickle.loads(data)

    def spawn(self, kind: str) -> Child:
        """Forks a child. It waits for a job on its connection."""
        name = self.folder / f"{kind}-{next(self._names)}"
        ours, theirs = socket.socketpair()
        paths = (str(name) + ".out", str(name) + ".err")
        socket.send_fds(self._socket, [pickle.dumps(("spawn", kind, *paths))], [theirs.fileno()])
        theirs.close()
        while True:
            message = self._receive(30)
            if message[0] == "pid":
                return Child(message[1], Connection(ours.detach()), Path(paths[0]), Path(paths[1]))
            self.exits[message[1]] = message[2]

    def wait_exit(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a child, or None if it is still there after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while pid not in self.exits:
            with contextlib.suppress(TimeoutError, BlockingIOError):
                message = self._receive(max(deadline - time.monotonic(), 1e-3))
                self.exits[message[1]] = message[2]
                continue
            if time.monotonic() >= deadline:
                return None
        return self.exits[pid]

    def new_store(self) -> str:
        """A path for a FileStore that was never used."""
        return str(self.folder / f"store-{next(self._names)}")

    def close(self) -> None:
        """Ends the zygote and, with it, every child."""
        self._socket.close()
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Child:
    """A forked process and the files that its output goes to."""

    pid: int
    connection: Connection
    stdout: Path
    stderr: Path
    stderr_read: int = 0

    def kill(self, zygote_: Zygote, dump: bool = False) -> None:
        """Ends the process; with `dump`, its Python stacks go to its stderr first."""
        with contextlib.suppress(ProcessLookupError):
            if dump:
                os.kill(self.pid, zygote.DUMP_SIGNAL)
                zygote_.wait_exit(self.pid, 0.5)
            os.killpg(self.pid, signal.SIGKILL)
        zygote_.wait_exit(self.pid, 10)
        self.connection.close()

    def new_stderr(self) -> str:
        """What it wrote to stderr since the last call."""
        text = self.stderr.read_bytes()[self.stderr_read :] if self.stderr.exists() else b""
        self.stderr_read += len(text)
        return text.decode(errors="replace")


_zygotes: dict[str, Zygote] = {}
"""By the library that they preload."""
_pool: list[Child] = []
_job_numbers = itertools.count()


def the_zygote(preload: str = "") -> Zygote:
    """The session's fork server, started when first needed; one for each library that is preloaded."""
    if preload not in _zygotes:
        _zygotes[preload] = Zygote(preload)
    return _zygotes[preload]


def close_session() -> None:
    """Ends the pool and the zygotes. The session's fixture calls it."""
    for child in _pool:
        child.connection.close()
    _pool.clear()
    for zygote_ in _zygotes.values():
        zygote_.close()
    _zygotes.clear()


def _job(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    path = str(Path(inspect.getsourcefile(fn) or "").resolve())
    return {"path": path, "function": fn.__name__, "rank": rank, "world_size": world_size, "args": args, **more}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str | None = None,
    init: bool = True,
    env: dict[str, str] | None = None,
    group_timeout_s: float = 50,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on every rank and returns the results by rank.

    Args:
        fn: A module-level function of a test file.
        timeout: Seconds after which the ranks are killed and the test fails.
        init: Whether to init and destroy the default group around `fn`.
        env: Variables set in the ranks for the time of the call (after torch was imported).
        group_timeout_s: The default group's timeout.

    Raises:
        RankError: Naming each rank that failed, with its traceback.
    """
    server = the_zygote()
    while len(_pool) < world_size:
        _pool.append(server.spawn("worker"))
    workers = _pool[:world_size]
    store, number = server.new_store(), next(_job_numbers)
    for rank, worker in enumerate(workers):
        worker.new_stderr()
        worker.connection.send(
            _job(
                fn,
                rank,
                world_size,
                args,
                number=number,
                env=env or {},
                init=init,
                store=store,
                backend=backend or BACKEND,
                group_timeout_s=group_timeout_s,
            )
        )
    try:
        results, failures = _collect(workers, number, timeout)
    except BaseException:  # Ctrl-C, pytest's own time limits: nobody may find these workers in the middle of a job.
        del _pool[:world_size]
        for worker in workers:
            worker.kill(server)
        raise
    if failures:
        del _pool[:world_size]  # In an unknown state: the next test gets new ones.
        lines = [f"{fn.__name__} failed on {len(failures)} of {world_size} ranks"]
        first: dict[str, int] = {}
        for rank, text in sorted(failures.items()):
            if "process died" in text:
                server.wait_exit(workers[rank].pid, 1.0)
            workers[rank].kill(server, dump="no answer" in text)
            if "process died" in text:
                text += f" with exit code {server.exits.get(workers[rank].pid)}"
            text += "\n" + workers[rank].new_stderr()[-6000:]
            same = first.setdefault(text, rank)
            lines.append(f"---- rank {rank}: {text if same == rank else f'the same as rank {same}'}")
        for rank in set(range(world_size)) - set(failures):
            workers[rank].kill(server)
        raise RankError("\n".join(lines))
    return [results[rank] for rank in range(world_size)]


def _collect(workers: list[Child], job_number: int, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
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
    backend: str | None = None,
    init: bool = True,
    env: dict[str, str] | None = None,
    group_timeout_s: float = 50,
    executed: bool = False,
    preload: str = "",
) -> list[Outcome]:
    """Runs `fn(rank, world_size, *args)` in new processes and returns how each ended; raises nothing itself.

    The group, if `init`, is not destroyed afterwards: the function does that, or does not. With `executed`, processes
    are started from the executable instead of being forked, so that variables read while torch is imported take
    effect; they are slower to start and have no result. `preload` is a library that all of them preload.
    """
    server = the_zygote(preload)
    store = server.new_store()
    common = {
        "env": env or {},
        "init": init,
        "store": store,
        "backend": backend or BACKEND,
        "group_timeout_s": group_timeout_s,
    }
    jobs = [_job(fn, rank, world_size, args, **common) for rank in range(world_size)]
    if executed:
        return _run_executed(server, jobs, timeout)
    children = [server.spawn("fresh") for _ in jobs]
    for child, job in zip(children, jobs, strict=True):
        child.connection.send(job)
    deadline = time.monotonic() + timeout
    outcomes = []
    for rank, child in enumerate(children):
        exitcode = server.wait_exit(child.pid, max(deadline - time.monotonic(), 0))
        ended_s, timed_out = time.monotonic(), exitcode is None
        if timed_out:
            child.kill(server, dump=True)
        result = None
        with contextlib.suppress(EOFError, OSError):
            if not child.connection.closed and child.connection.poll():
                result, ended_s = pickle.loads(child.connection.recv_bytes())
        child.connection.close()
        outcomes.append(
            Outcome(
                rank,
                server.exits.get(child.pid, -signal.SIGKILL),
                child.stdout.read_text(errors="replace"),
                child.stderr.read_text(errors="replace"),
                result,
                ended_s,
                timed_out,
                _end_process_group(child.pid),
            )
        )
    return outcomes


def _end_process_group(pid: int) -> bool:
    """Kills what a process that ended has left behind. Returns whether there was anything."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _run_executed(server: Zygote, jobs: list[dict[str, Any]], timeout_s: float) -> list[Outcome]:
    processes = []
    for job in jobs:
        base = server.new_store()
        Path(base + ".job").write_bytes(pickle.dumps(job))
        with open(base + ".out", "wb") as out, open(base + ".err", "wb") as err:
            command = [sys.executable, str(HERE / "zygote.py"), "--exec", base + ".job"]
            environment = {**server.environment, **job["env"]}
            processes.append(
                (base, subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True))
            )
    deadline = time.monotonic() + timeout_s
    outcomes = []
    for rank, (base, process) in enumerate(processes):
        timed_out = False
        try:
            process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            timed_out = True
            process.send_signal(zygote.DUMP_SIGNAL)
            time.sleep(0.5)
            process.kill()
            process.wait()
        texts = [Path(base + end).read_text(errors="replace") for end in (".out", ".err")]
        left = _end_process_group(process.pid)
        outcomes.append(Outcome(rank, process.returncode, *texts, None, time.monotonic(), timed_out, left))
    return outcomes


def assert_clean_exits(outcomes: list[Outcome], codes: list[int] | None = None) -> None:
    """Fails, with the output of the process, unless every process ended in time with its expected exit code."""
    for outcome, code in zip(outcomes, codes or [0] * len(outcomes), strict=True):
        if outcome.timed_out or outcome.exitcode != code:
            how = "hung and was killed" if outcome.timed_out else f"ended with {outcome.exitcode}, not {code}"
            text = f"{outcome.stdout[-2000:]}\n{outcome.stderr[-6000:]}"
            raise RankError(f"rank {outcome.rank} {how}\n{text}")
        if outcome.left_processes:
            raise RankError(f"rank {outcome.rank} left a process behind")


class Cases:
    """Many combinations in one run: goes on after a failed one, and names all that failed at the end.

    cases = Cases()
    with cases("SUM float32 n=3"):
        ...
    cases.check()
    """

    def __init__(self, limit: int = 12) -> None:
        self._failures: list[str] = []
        self._limit = limit
        self.count = 0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.count += 1
        try:
            yield
        except Exception as error:
            self._failures.append(f"[{name}] {type(error).__name__}: {str(error)[:400]}")
            if len(self._failures) >= self._limit:
                self.check()

    def check(self) -> None:
        """Raises if any case failed."""
        if self._failures:
            raise AssertionError(f"{len(self._failures)} of {self.count} cases failed:\n" + "\n".join(self._failures))


def expect_error(fn: Callable[[], Any], *words: str, within_s: float | None = None) -> str:
    """Calls `fn`, which must raise; returns the message, which must contain all `words` (case does not matter).

    Args:
        within_s: It must take no longer than this on a machine that has time for it; STALL_S more are given. That tells
            an error which comes by itself from one that comes with the group's timeout.
    """
    start_s = time.monotonic()
    try:
        fn()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"no error was raised; expected one with {words}")
    took_s = time.monotonic() - start_s
    limit_s = math.inf if within_s is None else within_s + STALL_S
    assert took_s <= limit_s, f"the error took {took_s:.1f} s, more than {limit_s} s: {message}"
    missing = [word for word in words if word.lower() not in message.lower()]
    assert not missing, f"the message lacks {missing}: {message}"
    return message


def store() -> dist.Store:
    """The default group's store, with a prefix of our own, for signals between ranks that use no collective."""
    return dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
