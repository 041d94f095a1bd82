"""What horonrun starts on each of several hosts: says how the host is reached, gets its order, and starts its ranks.

python -m horon.runner._node

The order is the first line of its input. After it come ``end <signal>`` or the end of the input, when whoever has
started it is gone: then it ends its ranks. What it has to say are reports in its output (_reports.py), whose rest is
its ranks'.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from horon.runner import _child, _processes, _reports
from horon.runner._failures import failures_left_in, failures_of
from horon.runner._outputs import Output, OutputError

# An agent whose ranks have ended waits for the other hosts' agents in C++, where no signal reaches it, for up to five
# minutes; so it does where all agents meet. If there is no rank for so long after the end was told, nothing is lost.
_BLOCKED_AFTER_S = 3.0
# How often it is looked whether ranks are left then.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Hello:
    """How a host is reached.

    Attributes:
        client: The address of the host that has started this, as seen from here; empty: they are the same.
        server: The address by which that one has reached this host; empty as well.
        port: One that was free.
    """

    client: str
    server: str
    port: int


@dataclass(frozen=True)
class Order:
    """What is to be started on a host.

    Attributes:
        ranks_per_host: Of all hosts.
        number: This host's place among them.
        master_address, master_port: Where the first host's store is, as seen from here.
        own_address: By which other hosts reach this one; empty: not known.
        folder: Where the ranks work.
        environment: Variables of the ranks.
        command: What they are.
        task: For horon.run, whose `command` ends with the folder that holds it; in base64. None: no task.
        start_timeout: Seconds until all hosts have come.
        output: Arguments of Output.
    """

    ranks_per_host: Sequence[int]
    number: int
    master_address: str
    master_port: int
    own_address: str
    folder: str
    environment: Mapping[str, str]
    command: Sequence[str]
    task: str | None
    start_timeout: float | None
    output: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        failures: Arguments of Failure.
        problem: Why nothing was started, or nothing.
        results: What a task's ranks returned, by rank, pickled and in base64.
    """

    failures: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    results: Mapping[str, str] = field(default_factory=dict)


def hello(environment: Mapping[str, str]) -> Hello:
    """What the variables of an ssh session say."""
    words = environment.get("SSH_CONNECTION", "").split()
    client, server = (words[0], words[2]) if len(words) == 4 else ("", "")
    with socket.socket() as probe:
        probe.bind(("", 0))
        return Hello(client, server, probe.getsockname()[1])


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Returns which interface has an address, if one has it."""
    plain = address.partition("%")[0]
    return next((name for name, theirs in interfaces.items() if plain in (a.partition("%")[0] for a in theirs)), None)


def _interfaces() -> dict[str, list[str]]:
    return {name: [one.address for one in found] for name, found in psutil.net_if_addrs().items()}


def variables_of(order: Order, interfaces: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the variables of a host's ranks.

    Gloo listens at the address that the host's name has, which is a loopback address on many hosts: it gets the
    interface through which the other hosts come, unless one was chosen.
    """
    chosen = order.environment.get("HOROVOD_GLOO_IFACE") or interface_of(order.own_address, interfaces)
    interface = {"GLOO_SOCKET_IFNAME": chosen} if chosen else {}
    counts = ",".join(map(str, order.ranks_per_host))
    return {
        **interface,
        **order.environment,
        _child.RANKS_PER_HOST_VARIABLE: counts,
    }


def _carry_out(order: Order, end: _End) -> Outcome:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from horon.runner import _task

    number = order.number
    first, n_ranks = sum(order.ranks_per_host[:number]), order.ranks_per_host[number]
    counts = order.ranks_per_host
    place = _processes.Place(number, len(counts), first, sum(counts), order.master_address, order.master_port)
    output = Output(**order.output)
    variables = variables_of(order, _interfaces())
    with tempfile.TemporaryDirectory(prefix="horon-run-") as name:
        folder = Path(name)
        said = folder / "said"
        said.mkdir()
        command = list(order.command)
        if order.task is not None:
            _task.leave(folder, base64.b64decode(order.task))
            command.append(name)
        try:
            # Over before a signal can hide what has just been found out.
            _processes.start_and_wait(
                n_ranks, command, variables, order.start_timeout, output, place, str(said), end.mark_over
            )
        except ChildFailedError as error:
            return Outcome([asdict(failure) for failure in failures_of(error)])
        except SignalException as told:  # another host's rank was the first to end; one of these may be why
            problem = "" if end.was_told else f"the launcher there was ended by signal {int(told.sigval)}"
            return Outcome([asdict(failure) for failure in failures_left_in(said, first)], problem)
        if order.task is None:
            return Outcome()
        ranks = range(first, first + n_ranks)
        found = {str(rank): _task.read_result(folder, rank) for rank in ranks}
    return Outcome(results={rank: base64.b64encode(result).decode() for rank, result in found.items()})


def _problem_text(error: Exception, order: Order) -> str:
    from torch.distributed import DistError

    if isinstance(error, OutputError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, DistError):  # raised where the agents of all hosts meet
        where = f"{order.master_address}:{order.master_port}"
        nobody_came = f" Others did not come to port {order.master_port} here"
        text += nobody_came if order.number == 0 else f" It is to be at {where}"
        text += "; MASTER_ADDR and MASTER_PORT choose another address of the first host."
    return text


class _Orders:
    """Lines from a descriptor. Not a file object: a thread that waits for one at exit would hold its lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self) -> bytes:
        """Blocks until there is one. Nothing: whoever gives them is gone."""
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            piece = os.read(self._descriptor, 1 << 20)
            if not piece:
                return b""
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        return line + b"\n"


class _End:
    """When whoever has started this launcher says that it is to end, or is gone.

    Args:
        give_up: Says that there is nothing to say, where the ranks are gone and the main thread can not.
    """

    def __init__(self, orders: _Orders, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._was_told = threading.Event()
        self._is_over = threading.Event()
        self._deciding = threading.Lock()  # held while that is set, and for ever by who has given up instead
        threading.Thread(target=self._await, args=(orders,), daemon=True).start()

    @property
    def was_told(self) -> bool:
        return self._was_told.is_set()

    def _await(self, orders: _Orders) -> None:
        line = orders.next()
        self._was_told.set()
        if not self._is_over.is_set():
            os.kill(os.getpid(), int(line.split()[1]) if line.startswith(b"end ") else signal.SIGTERM)
        gone_since_s = time.monotonic()
        while not self._is_over.wait(_LOOK_S):  # the agent waits for its ranks, and nobody else can
            now_s = time.monotonic()
            if psutil.Process().children():
                gone_since_s = now_s
            elif now_s - gone_since_s > _BLOCKED_AFTER_S:
                self._exit()

    def _exit(self) -> None:
        with self._deciding:
            if not self._is_over.is_set():
                try:
                    self._give_up()
                finally:
                    os._exit(0)

    def mark_over(self) -> None:
        """The ranks have ended: there is nothing left to end."""
        with self._deciding:
            self._is_over.set()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)

    def wait(self) -> None:
        self._was_told.wait()


def _serve_store(order: Order) -> Any:
    """The store of all hosts, on the first one. The agent shares it, and would end it too early."""
    if order.number > 0:
        return None
    from torch.distributed import TCPStore

    return TCPStore("localhost", order.master_port, is_master=True, wait_for_workers=False, multi_tenant=True)


def main() -> None:
    """Exits with 0 whenever it could say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the agent has its own handler: there is nothing to be undone
    # What ranks read and print are not ours.
    orders = _Orders(os.dup(0))
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def report(kind: str, value: Any) -> None:
        for line in _reports.encode({kind: asdict(value)}):
            data = memoryview(line)
            while data:
                data = data[reports.write(data) :]

    report("hello", hello(os.environ))
    line = orders.next()
    if not line or line.startswith(b"end "):  # another host can not be had
        return
    order = Order(**json.loads(line))
    end = _End(orders, lambda: report("outcome", Outcome()))
    try:
        os.chdir(order.folder)
    except OSError as error:
        print(f"horonrun: {order.folder} on {socket.gethostname()}: {error.strerror}; ranks there work in "
              f"{os.getcwd()}", file=sys.stderr, flush=True)  # fmt: skip
    store = None
    try:
        store = _serve_store(order)
        outcome = _carry_out(order, end)
    except Exception as error:
        outcome = Outcome(problem=_problem_text(error, order))
    end.mark_over()
    report("outcome", outcome)
    end.wait()  # until all hosts are done
    del store


if __name__ == "__main__":
    main()
