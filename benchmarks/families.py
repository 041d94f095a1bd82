"""The processes of a benchmark. A family is one process for each rank, with a torch and a launcher of its own.

horon, Gloo and the other c10d backends share the family "torch"; Open MPI, Horovod and DeepSpeed have one each, because
they need their own launchers, environments or versions of torch. The driver gives work to one family at a time. The
others sleep in a read meanwhile; Horovod's, whose background thread would go on polling, is stopped by a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from channel import Channel, Closed, Message

kPeerModules = {"mpi": "mpi4py", "horovod": "horovod", "deepspeed": "deepspeed"}
_HERE = Path(__file__).resolve().parent
_START_SECONDS = 180.0
_PR_SET_PDEATHSIG = 1


class RankFailed(RuntimeError):
    """A rank ended, or did not answer in time; every process of the benchmark is being killed."""


def family_of(contender: str) -> str:
    return contender if contender in kPeerModules else "torch"


def peer_python(venv: Path) -> Path:
    """Returns the interpreter of the environment that build_peers.sh made."""
    return venv / "bin" / "python"


def why_missing(family: str, venv: Path) -> str | None:
    """Returns what a peer lacks, or None if it is installed."""
    python = peer_python(venv)
    if not python.exists():
        return f"there is no {venv}; make it with: benchmarks/build_peers.sh {venv}"
    module = kPeerModules[family]
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", code], check=False).returncode != 0:
        return f"{venv} has no {module}; add it with: PEERS={module} benchmarks/build_peers.sh {venv}"
    if family == "mpi" and shutil.which("mpirun") is None:
        return "there is no mpirun. Debian, Ubuntu: apt-get install openmpi-bin"
    return None


def launch_commands(family: str, n_ranks: int, python: Path, mpi_args: Sequence[str]) -> list[list[str]]:
    """Returns the command lines that start all ranks; name of the family and socket are to follow."""
    program = [str(python), str(_HERE / "worker.py")]
    if family == "mpi":
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return [["mpirun", *as_root, "--oversubscribe", *mpi_args, "-np", str(n_ranks), *program]]
    if family == "horovod":
        launcher = str(python.with_name("horovodrun"))
        return [[launcher, "--gloo", "-np", str(n_ranks), "-H", f"localhost:{n_ranks}", *program]]
    return [program] * n_ranks


class Family:
    """Ownership: owns the processes and the channels to them."""

    def __init__(self, name: str, n_ranks: int) -> None:
        self.name = name
        self._n_ranks = n_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []  # by rank
        self._pids: list[int] = []
        self._stops_when_idle = name == "horovod"

    def start(self, folder: Path, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        """Starts the ranks and waits until all have met.

        Raises:
            RankFailed: They did not.
        """
        path = str(folder / f"{self.name}.socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(self._n_ranks)
            for rank, command in enumerate(commands):
                self._processes.append(
                    subprocess.Popen(
                        [*command, self.name, path],
                        env={**environment, **_rank_variables(rank, self._n_ranks, folder)},
                        stdin=subprocess.DEVNULL,
                        stdout=sys.stderr,
                        start_new_session=True,
                        preexec_fn=_die_with_driver,
                    )
                )
            deadline = time.monotonic() + _START_SECONDS
            connections = [Channel(self._accept(listener, deadline)) for _ in range(self._n_ranks)]
        by_rank: dict[int, Channel] = {}
        for channel in connections:
            hello = self._reply(channel, "a rank that starts", deadline)
            by_rank[hello["rank"]] = channel
            self._pids.append(hello["pid"])
        self._channels = [by_rank[rank] for rank in range(self._n_ranks)]
        self._signal_if_stoppable(signal.SIGSTOP)

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        while time.monotonic() < deadline:
            listener.settimeout(1)
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended:
                raise RankFailed(f"{self.name}: a process ended with exit code {ended[0]} while it started")
        raise RankFailed(f"{self.name}: not all {self._n_ranks} ranks started within {_START_SECONDS:.0f} s")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the ranks run; outside they may be stopped."""
        self._signal_if_stoppable(signal.SIGCONT)
        yield
        self._signal_if_stoppable(signal.SIGSTOP)

    def ask(self, deadline: float, message: Message) -> list[Message]:
        """Sends to all ranks and returns their replies, by rank.

        Raises:
            RankFailed: A rank ended (its traceback is on stderr), or the time was over.
        """
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(message)
            except Closed:
                raise RankFailed(f"{self.name}: rank {rank} has ended") from None
        return [
            self._reply(channel, f"rank {rank}, in {message.get('do', 'a batch')}", deadline)
            for rank, channel in enumerate(self._channels)
        ]

    def _reply(self, channel: Channel, who: str, deadline: float) -> Message:
        try:
            return channel.receive(max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            raise RankFailed(f"{self.name}: {who}: no answer in time") from None
        except Closed:
            raise RankFailed(f"{self.name}: {who}: it has ended") from None

    def _signal_if_stoppable(self, number: signal.Signals) -> None:
        if self._stops_when_idle:
            for rank, pid in enumerate(self._pids):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    raise RankFailed(f"{self.name}: process {rank} has ended") from None

    def end(self, seconds: float = 20) -> None:
        """Lets the ranks shut down, and kills what is left after `seconds`. Idempotent."""
        with contextlib.suppress(RankFailed):
            self._signal_if_stoppable(signal.SIGCONT)
        for channel in self._channels:
            with contextlib.suppress(Closed):
                channel.send({"do": "end"})
            channel.close()
        if self._channels:
            deadline = time.monotonic() + seconds
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        self._channels = []
        self.kill()

    def kill(self) -> None:
        """Ends whatever still runs, at once."""
        for process in self._processes:
            if process.poll() is None:
                for pid in self._pids:  # a launcher may have put them into other sessions
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []
        if self.name == "deepspeed":  # it leaves its memory behind
            for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{_unused_port()}_*"):
                path.unlink(missing_ok=True)


def environment(family: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the ranks' environment: one thread each, and nothing of ours for the peers."""
    result = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    if family == "torch":
        return {**result, **extra}
    result.pop("PYTHONPATH", None)  # their torch is another
    return {**result, "DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _rank_variables(rank: int, n_ranks: int, folder: Path) -> dict[str, str]:
    """Returns what torch and DeepSpeed start from; the launchers of the other families set their own."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_unused_port()),
        "HORON_BENCH_STORE": str(folder / "store"),
    }


def _unused_port() -> int:
    """Returns a number of this run's own, which DeepSpeed's memory is named after; nothing listens there."""
    return 10_000 + os.getpid() % 50_000


def _die_with_driver() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
